"""GPU memory of one row without weights, traced through the real layers of the model's architecture."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from configs.registry import resolve
from configs.schema import RunConfig
from models.library_loading import quiet_libraries
from models.memory.activation_tracing import Footprints
from models.memory.architectures import architecture_of
from models.memory.published import Architecture
from models.policies import LAST_FRAME, POLICIES, most_images
from models.policies.diffusion import DiffusionSettings
from models.policies.parts import Part
from models.weights.lora import LoraSpec
from tasks.algorithms.base import Requirements
from tasks.inputs.components import as_evaluated, lora_spec
from tasks.inputs.prompts import uses_guidance

#: Height and width that every family's small pipeline can make.
_SMALL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of one row, without weights."""

    sampling: int
    """A forward without gradient."""
    training: int
    """A forward and backward."""
    decoding: int
    """Decoding of its latents."""
    kept: int = 0
    """Activations that a forward keeps for its backward, if measured."""
    following: int = 0
    """Decoding of its latents and the backward to them, if measured."""
    stored: int = 0
    """Its training data from the store: latents twice, and conditioning."""


def measure_activations(config: RunConfig, requires: Requirements) -> Activations | None:
    """Return the memory of one row, or None if the architecture is unknown.

    Args:
        config: the config.
        requires: its algorithm's needs; gradients of rewards are measured only if it needs them.
    """
    architecture = None if config.model.path is None else architecture_of(config.model.path)
    if architecture is None:
        return None
    family = resolve(POLICIES, config.model.policy, label="model.policy")
    spec, larger = lora_spec(config, family), as_evaluated(config)
    traced = footprints_of(config, architecture, spec)
    trained = traced if requires.guided else footprints_of(config, architecture, spec, guided=False)
    evaluated = traced if larger is config else footprints_of(larger, architecture, spec)
    return Activations(
        sampling=max(traced.sampling(), evaluated.sampling()),
        training=trained.training(),
        decoding=max(traced.decoding(), evaluated.decoding()),
        kept=trained.keeping() if requires.rewards else 0,
        following=traced.following() if requires.rewards or requires.gradients else 0,
        stored=trained.stored(),
    )


def footprints_of(
    config: RunConfig, architecture: Architecture, spec: LoraSpec | None, *, guided: bool = True
) -> Footprints:
    """Return the tracer of activations for the model's architecture and family; guided if rollouts are."""
    from models.quickstart.tiny import build_tiny

    quiet_libraries()
    model = config.model
    settings = DiffusionSettings(
        height=model.height,
        width=model.width,
        guidance_scale=model.guidance_scale,
        dtype=getattr(torch, model.dtype),
        train_negative=config.optimize.guidance_gradient == "both",
        gradient_checkpointing=model.gradient_checkpointing,
        frames=model.frames,
        vae_tiling=model.vae_tiling,
    )
    family = resolve(POLICIES, model.policy, label="model.policy")
    small = replace(settings, height=_SMALL, width=_SMALL)
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(model.policy).save_pretrained(folder)
        policy = family.load(Path(folder), small, frozenset(Part), model.options)
    # The small model does not support all sizes of the real one, so they are set after loading.
    policy.settings = settings
    image = np.zeros((model.height, model.width, 3), np.uint8)
    most = most_images(model.policy, model.options)
    # The number of given frames of a clip has a negligible effect on memory.
    images = [[image] * (1 if model.policy in LAST_FRAME else most)] if most else None
    return Footprints(policy, architecture, spec, guided=guided and uses_guidance(config), images=images)
