"""Renders texts as images with a frozen model, by the ODE from seeded noise, and estimates the memory of it.

Legend: B texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Sampler, ode_plan, sample
from flowmill.models.maths.transitions import ODE
from flowmill.models.memory.architectures import architecture_of, meta_decoder, meta_denoiser, parameters
from flowmill.models.policies import POLICIES
from flowmill.models.policies.diffusion import DiffusionPolicy, Images
from flowmill.models.policies.nan_checks import finite
from flowmill.models.weights.lora import LoraSpec
from flowmill.models.weights.quantized import dequantizing_bytes, largest_layer, weight_bytes
from flowmill.tasks.inputs.components import decode_rows, make_solver
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.modalities.diffusion.activations import footprints_of
from flowmill.tasks.modalities.diffusion.evaluation_sampling import no_noise
from flowmill.tasks.modalities.diffusion.final_samples import Finals
from flowmill.tasks.modalities.diffusion.memory import text_bytes
from flowmill.tasks.modalities.memory import BYTES, MASTER, DrawingMemory
from flowmill.tasks.runs.seeds import generator

if TYPE_CHECKING:
    from torch import Tensor

    from flowmill.tasks.runtime.renderer import Renderer


def draw(renderer: Renderer, texts: Sequence[str], seeds: Sequence[int], images: Images) -> np.ndarray:
    """Return (B, H, W, 3) uint8 images; batches are padded to a fixed size, so the same kernels run for any B.

    Args:
        renderer: the model.
        texts: at most ``execution.rollout_batch_size``.
        seeds: seeds of the initial noise, one each.
        images: source images of each text's prompt, (H, W, 3) uint8; none where the model reads none.
    """
    config, size = renderer.config, renderer.config.execution.rollout_batch_size
    padding = [*range(len(texts)), *[len(texts) - 1] * (size - len(texts))]
    policy = cast(DiffusionPolicy, renderer.policy())
    started = [images[row] for row in padding]
    positive = _encoded(renderer, [texts[row] for row in padding], started)
    negative = _encoded(renderer, [config.model.negative_prompt] * size, started) if uses_guidance(config) else None
    conditioning = Conditioning(positive, negative)
    rollout = sample(
        policy,
        conditioning,
        policy.initial_latents([generator(seeds[row]) for row in padding]),
        policy.sigmas(config.rollout.steps),
        sampler=Sampler(kernel=ODE(), solver=make_solver(config.evaluate.solver, "render.solver")),
        plans=[ode_plan()] * size,
        noise=no_noise,
    )
    with torch.no_grad():
        media = Finals.of(policy, rollout.final, config, conditioning).media
    assert media is not None
    return media[: len(texts)]


@torch.no_grad()
def _encoded(renderer: Renderer, texts: Sequence[str], images: Images) -> Mapping[str, Tensor]:
    policy = cast(DiffusionPolicy, renderer.policy())
    # A language model wrote the texts: control tokens in them must not stop the run.
    pictures = [images] if any(images) else []
    tensors: dict[str, Tensor] = policy.encode([policy.as_plain(text) for text in texts], *pictures)
    for name, rows in tensors.items():
        finite(rows, f"embeddings '{name}'")
    # Positions, lengths and masks stay integers.
    return {
        name: rows.to(renderer.device, renderer.dtype if rows.is_floating_point() else rows.dtype)
        for name, rows in tensors.items()
    }


def drawing_memory(config: RunConfig) -> DrawingMemory | None:
    """Return the memory of a frozen model that renders texts; None if the architecture is unknown."""
    architecture = None if config.model.path is None else architecture_of(config.model.path)
    if architecture is None:
        return None
    execution, number = config.execution, BYTES[config.model.dtype]
    module, quantizer = meta_denoiser(architecture), config.model.quantizer
    denoisers = weight_bytes(module, quantizer, number) * architecture.denoisers
    layer = dequantizing_bytes(quantizer, largest_layer(module, quantizer), number)
    text, reading = text_bytes(config, architecture)
    family = resolve(POLICIES, config.model.policy, label="render.model.policy")
    # Fully trained weights would be cast for every forward; with the smallest adapters they keep their dtype.
    traced = footprints_of(config, architecture, LoraSpec(rank=1, alpha=1, targets=tuple(family.lora_targets)))
    return DrawingMemory(
        weights=denoisers + text + parameters(meta_decoder(architecture)) * MASTER,
        work=max(traced.sampling(execution.rollout_batch_size) + layer, reading, traced.decoding(decode_rows(config))),
    )
