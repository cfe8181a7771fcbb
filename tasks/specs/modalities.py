"""What a kind of policy adds to the identities of stages: of what it is told, the settings that change results.

How its samples are made, trained and shown is ``tasks.modalities``'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from configs.registry import Table, create
from configs.schema import RunConfig
from tasks.inputs.policy_kind import kind_name

MODALITY_SPECS = Table(
    {
        "diffusion": "tasks.specs.diffusion:DiffusionSpec",
        "tokens": "tasks.specs.tokens:TokensSpec",
    },
    like="tasks.specs.modalities:ModalitySpec",
)


class ModalitySpec(ABC):
    """The options of stages that only one kind of policy has. All are plain JSON values, by option."""

    @abstractmethod
    def encoding_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return what the conditioning of a prompt depends on, besides the base model."""

    @abstractmethod
    def rollout_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return what the samples of a rollout depend on, besides policy, prompts, seed and epoch."""

    @abstractmethod
    def evaluation_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return what the samples of an evaluation depend on, besides policy, prompts, seed and number."""

    @abstractmethod
    def training_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return what training depends on, besides its inputs and the section ``optimize``."""

    def value_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return what values of samples depend on, where the kind has such; asked where an estimator needs them."""
        return {}

    @abstractmethod
    def export_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return what of the kind an export tells, besides what all exports do."""


def modality_spec(config: RunConfig) -> ModalitySpec:
    """Return what the kind of a run's policy adds to identities.

    Raises:
        ConfigError: there is no such kind.
    """
    found: ModalitySpec = create(MODALITY_SPECS, kind_name(config), {}, label="model.kind")
    return found
