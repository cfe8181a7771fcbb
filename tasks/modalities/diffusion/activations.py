"""GPU memory of batches without weights, traced through the real layers of the model's architecture."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from flowmill.configs.model import ModelSection
from flowmill.configs.model_families import most_images, spec_of
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.memory.activation_tracing import Footprints
from flowmill.models.memory.published import Architecture
from flowmill.models.policies import POLICIES
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.weights.lora import LoraSpec
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.inputs.components import as_evaluated, decode_rows
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.modalities.diffusion.trained_rewards import rows_at_once

#: Height and width that every family's small pipeline can make.
_SMALL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of batches, without weights."""

    sampling: int
    """A forward of ``execution.rollout_batch_size`` rows without gradient."""
    training: int
    """A forward and backward of ``execution.micro_batch_size`` rows."""
    decoding: int
    """Decoding of ``execution.decode_batch_size`` rows."""
    encoding: int = 0
    """Encoding of a prompt's images, one at a time; 0 if prompts have none."""
    retained: int = 0
    """Activations that a forward of a micro-batch keeps for its backward, if measured."""
    following: int = 0
    """Decoding of the rows that rewards differentiate at once, and the backward pass to latents, if measured."""
    stored: int = 0
    """The training data of one row from the store: latents twice, and conditioning."""


def measure_activations(
    config: RunConfig, architecture: Architecture, spec: LoraSpec | None, requires: Requirements
) -> Activations:
    """Return the memory of batches.

    Args:
        config: the config.
        architecture: that of its model.
        spec: its adapters.
        requires: its algorithm's needs; gradients of rewards are measured only if it needs them.
    """
    execution, larger = config.execution, as_evaluated(config)
    traced = footprints_of(config, architecture, spec)
    trained = traced if requires.guided else footprints_of(config, architecture, spec, guided=False)
    evaluated = footprints_of(larger, architecture, spec)
    micro, differentiated = execution.micro_batch_size, requires.rewards or requires.gradients
    return Activations(
        sampling=max(each.sampling(execution.rollout_batch_size) for each in (traced, evaluated)),
        training=trained.training(micro),
        decoding=max(each.decoding(decode_rows(config)) for each in (traced, evaluated)),
        # It takes at most the memory of decoding an image.
        encoding=max(each.decoding(1) for each in (traced, evaluated)) if reads_images(config) else 0,
        retained=trained.keeping(micro) if requires.rewards else 0,
        following=traced.following(rows_of_rewards(config, requires)) if differentiated else 0,
        stored=trained.stored(),
    )


def reads_images(config: RunConfig) -> bool:
    """Return whether the images of prompts are encoded by the autoencoder."""
    family = resolve(POLICIES, config.model.policy, label="model.policy")
    return Part.VAE in family.parts_to_encode(config.model.options)


def rows_of_rewards(config: RunConfig, requires: Requirements) -> int:
    """Return the number of rows whose rewards are differentiated at once."""
    return rows_at_once(config) if requires.rewards else decode_rows(config)


def footprints_of(
    config: RunConfig, architecture: Architecture, spec: LoraSpec | None, *, guided: bool = True
) -> Footprints:
    """Return the tracer of activations for the model's architecture and family; guided if rollouts are."""
    quiet_libraries()
    guided = guided and uses_guidance(config)
    # Activations are those of the model that is not quantized.
    model = _Model(config.model.model_copy(update={"quantize": None}), architecture)
    return _footprints(model, spec, guided, config.optimize.guidance_gradient == "both")


@dataclass(frozen=True, slots=True)
class _Model:
    """A model, compared by value."""

    section: ModelSection
    architecture: Architecture

    def __hash__(self) -> int:
        return hash(repr(self))


@lru_cache(8)
def _footprints(model: _Model, spec: LoraSpec | None, guided: bool, both: bool) -> Footprints:
    """Return the tracer of a model, which keeps its results: batch sizes and strategies do not change them."""
    from flowmill.models.quickstart.tiny import build_tiny

    section = model.section
    settings = DiffusionSettings(
        height=section.height,
        width=section.width,
        guidance_scale=section.guidance_scale,
        dtype=getattr(torch, section.dtype),
        train_negative=both,
        gradient_checkpointing=section.gradient_checkpointing,
        frames=section.frames,
        vae_tiling=section.vae_tiling,
    )
    family = resolve(POLICIES, section.policy, label="model.policy")
    small = replace(settings, height=_SMALL, width=_SMALL)
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(section.policy).save_pretrained(folder)
        policy = family.load(Path(folder), small, frozenset(Part), section.options)
    # The small model does not support all sizes of the real one, so they are set after loading.
    policy.settings = settings
    image = np.zeros((section.height, section.width, 3), np.uint8)
    most = most_images(section.policy, section.options)
    # The number of input frames of a clip has a negligible effect on memory.
    images = [[image] * (1 if spec_of(section.policy).last_frame else most)] if most else None
    return Footprints(policy, model.architecture, spec, guided=guided, images=images)
