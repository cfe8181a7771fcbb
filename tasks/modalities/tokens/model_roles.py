"""Memory of the trained models of a run: sizes of their weights and states, and the placement of the critic.

Legend: B rows, W positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from configs.schema import RunConfig
from models.memory.language_architectures import language_config, meta_critic
from models.memory.language_models import TextFootprints
from models.policies.base import PolicySettings
from models.policies.critic_lm import ValueModel, block_lists
from models.weights.lora import LoraSpec, adapted_parameters, lora_parameters
from models.weights.sharding import units
from tasks.modalities.memory import BYTES, MASTER, WHOLE_BLOCKS, OptimizerSizes, Placed, step_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The sizes of one trained model, on one rank."""

    parameters: int
    """Number of parameters."""
    trained: int
    """Number of trained parameters."""
    whole: int
    """Bytes of weights outside of training: whole weights and, with sharding, this rank's part."""
    spread: int
    """Bytes of weights while training: with fsdp this rank's part, and gathered blocks."""
    state: int
    """Bytes of gradients, moments, and copies of trained parameters."""
    placed: Placed
    """Placement of weights and state."""
    step: int
    """Bytes of the gradient exchange and the optimizer's step."""


class Sizes:
    """Computes the sizes of models on one rank under a config."""

    def __init__(self, config: RunConfig, optimizer: OptimizerSizes, spec: LoraSpec | None) -> None:
        self._config, self._optimizer, self._spec = config, optimizer, spec
        execution = config.execution
        self.parts = execution.holders

    def role(self, module: Any, blocks: tuple[str, ...], *, dtype: str, copies: int) -> Role:
        """Return the sizes of a trained model.

        Args:
            module: the model, without weights.
            blocks: names of its block lists.
            dtype: dtype of frozen weights.
            copies: number of float32 copies of trained parameters.
        """
        execution, number, parts = self._config.execution, BYTES[dtype], self.parts
        total = _numbers(module)
        # A critic without a backbone has no layers for adapters.
        lora = None if isinstance(module, ValueModel) and module.backbone is None else self._spec
        trained, weights = total, total * MASTER
        if lora is not None:
            head = _numbers(module.head) if isinstance(module, ValueModel) else 0
            trained = lora_parameters(module, lora) + head
            merged = adapted_parameters(module, lora) if dtype == "float32" and parts == 1 else 0
            weights = trained * MASTER + (total + merged) * number
        each = [_numbers(unit) for unit in units(module, blocks)]
        # Parameters outside of blocks, embeddings and the head, stay gathered during a forward.
        at_work = total - sum(each) + WHOLE_BLOCKS * max(each, default=0)
        working = at_work * (MASTER if lora is None else number) if parts > 1 else 0
        placed = Placed.of(execution, self._optimizer, weights=weights, trained=trained, copies=1 + copies)
        return Role(
            parameters=total,
            trained=trained,
            whole=weights + (placed.weights if parts > 1 else 0),
            spread=working + placed.weights,
            state=placed.state,
            placed=placed,
            step=step_bytes(self._config, trained, parts, self._optimizer),
        )

    def host(self, roles: Sequence[Role], dtype: str) -> dict[str, int]:
        """Return the host memory of trained models by label."""
        moments = 2 * self._optimizer.moment_bytes
        largest = 0 if self.parts > 1 else max(role.parameters for role in roles)
        found = {
            "models while they are read": largest * BYTES[dtype],
            "checkpoints": sum(int(role.trained * (MASTER + moments)) for role in roles) // self.parts,
            **{label: sum(role.placed.lines[label] for role in roles) for label in roles[0].placed.lines},
        }
        return {label: size for label, size in found.items() if size}


def _numbers(module: Any) -> int:
    found: int = sum(parameter.numel() for parameter in module.parameters())
    return found


def frozen_bytes(module: Any, number: int) -> int:
    """Return the bytes of a frozen copy; all layers except linear ones are float32, including tied weights."""
    precise = {
        id(parameter): parameter.numel()
        for layer in module.modules()
        if not isinstance(layer, torch.nn.Linear)
        for parameter in layer.parameters(recurse=False)
    }
    high: int = sum(precise.values())
    return high * MASTER + (_numbers(module) - high) * number


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
class BesideMemory:
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
    def of(cls, config: RunConfig, about: Any, sizes: Sizes, spec: LoraSpec | None) -> BesideMemory:
        """Return the critic of a run.

        Args:
            config: the config.
            about: the base model's transformers config.
            sizes: computes the sizes of roles.
            spec: adapters of policy and critic.
        """
        section = config.critic
        own, alone = section.backbone == "own", section.path is not None or section.device is not None
        about = about if section.path is None else language_config(section.path)
        dtype = section.dtype or config.model.dtype
        values, settings = meta_critic(about, own=own), settings_of(config, dtype)
        lists = () if values.backbone is None else tuple(f"backbone.{name}" for name in block_lists(values.backbone))
        return cls(
            anywhere=sizes.role(values, lists, dtype=dtype, copies=0),
            device=section.device,
            kind=_critic_kind(config),
            settings=None if alone else settings,
            measured=TextFootprints(about, settings, spec, critic=settings, own=own) if alone else None,
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
