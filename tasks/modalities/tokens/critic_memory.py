"""Memory of the critic of a run, and of a frozen copy of the base model.

Legend: B rows, W positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowmill.configs.schema import RunConfig
from flowmill.models.memory.architectures import parameters
from flowmill.models.memory.language_architectures import language_config, meta_critic
from flowmill.models.memory.language_models import TextFootprints, text_footprints
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.critic_lm import block_lists
from flowmill.models.weights.lora import within
from flowmill.tasks.modalities.memory import MASTER, Role, Sizes


def frozen_bytes(module: Any, number: int) -> int:
    """Return the bytes of a frozen copy; all layers except linear ones are float32, including tied weights."""
    precise = {
        id(parameter): parameter.numel()
        for layer in module.modules()
        if not isinstance(layer, torch.nn.Linear)
        for parameter in layer.parameters(recurse=False)
    }
    high: int = sum(precise.values())
    return high * MASTER + (parameters(module) - high) * number


def settings_of(config: RunConfig, dtype: str) -> PolicySettings:
    """Return the settings of a trained model."""
    model = config.model
    return PolicySettings(
        dtype=getattr(torch, dtype), gradient_checkpointing=model.gradient_checkpointing, attention=model.attention
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Working memory of a critic with its own model or device."""

    value: int = 0
    """Bytes on the policy's device while values are computed."""
    training: int = 0
    """Bytes on the policy's device of its forward and backward."""
    notes: tuple[str, ...] = ()
    """Notes on the memory of the critic's own device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticMemory:
    """The critic of a policy; without arguments, there is none."""

    anywhere: Role | None = None
    """Its sizes on its device."""
    device: str | None = None
    """Its own device, if it has one."""
    kind: str = ""
    """Description of the critic."""
    settings: PolicySettings | None = None
    """Its settings, if its activations are measured together with the policy's."""
    measured: TextFootprints | None = None
    """Measures it alone, if it has its own model or device."""

    @classmethod
    def of(cls, config: RunConfig, architecture: Any, sizes: Sizes, untrained: Sequence[str] = ()) -> CriticMemory:
        """Return the critic of a run.

        Args:
            config: the config.
            architecture: the base model's transformers config.
            sizes: computes the sizes of roles.
            untrained: names of parts of models that are not trained.
        """
        section = config.critic
        own, alone = section.backbone == "own", section.path is not None or section.device is not None
        architecture = architecture if section.path is None else language_config(section.path)
        dtype = section.dtype or config.model.dtype
        values, settings = meta_critic(architecture, own=own), settings_of(config, dtype)
        blocks = () if values.backbone is None else block_lists(values.backbone)
        lists = tuple(f"backbone.{name}" for name in blocks if not within(name, untrained))
        return cls(
            anywhere=sizes.role(values, lists, dtype=dtype, copies=0, head=values.head, untrained=untrained),
            device=section.device,
            kind=_critic_kind(config),
            settings=None if alone else settings,
            measured=text_footprints(architecture, settings, sizes.spec, critic=settings, own=own) if alone else None,
        )

    @property
    def critic(self) -> Role | None:
        """Its sizes on the policy's device."""
        return None if self.device is not None else self.anywhere

    def apart(self, rows: int, width: int) -> Apart:
        """Return the working memory of (B, W) rows, if it is not measured together with the policy."""
        if self.measured is None or self.anywhere is None:
            return Apart()
        value = self.measured.valuing(rows, width, reference=False)
        training = self.measured.training_of_critic(rows, width)
        if self.device is None:
            return Apart(value=value, training=training)
        role = self.anywhere
        most = max(role.whole + value, role.spread + role.state + max(training, role.step)) / 1e9
        return Apart(notes=(f"memory: the critic, {self.kind}, takes {most:.1f} GB of '{self.device}'.",))


def _critic_kind(config: RunConfig) -> str:
    if config.critic.backbone == "policy":
        return "a head on the actor"
    kind = "a copy of its own" if config.critic.path is None else "a model of its own"
    return kind if config.model.lora is None else f"{kind}, with adapters"
