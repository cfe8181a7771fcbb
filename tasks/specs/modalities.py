"""Options of stages that only one kind of policy has: its settings that change results.

``flowmill.tasks.modalities`` has the work of a kind: sampling, training, reports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from flowmill.configs.registry import Table, create
from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.policy_kind import kind_name

MODALITY_SPECS = Table(
    {
        "diffusion": "flowmill.tasks.specs.diffusion:DiffusionSpec",
        "tokens": "flowmill.tasks.specs.tokens:TokensSpec",
        "image_tokens": "flowmill.tasks.specs.tokens_of_images:ImageTokensSpec",
    },
    like="flowmill.tasks.specs.modalities:ModalitySpec",
)


class ModalitySpec(ABC):
    """The options of stages that only one kind of policy has. All are plain JSON values, by option."""

    @abstractmethod
    def encoding_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the options of prompt conditioning, besides the base model."""

    @abstractmethod
    def rollout_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the options of a rollout's samples, besides policy, prompts, seed and epoch."""

    @abstractmethod
    def given_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the options of ingested samples, besides their content, the base model and the store's format."""

    @abstractmethod
    def evaluation_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the options of an evaluation's samples, besides policy, prompts, seed and number."""

    @abstractmethod
    def training_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the options of training, besides its inputs and the section ``optimize``."""

    def value_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the options of values of samples, for kinds and estimators that have values."""
        return {}

    @abstractmethod
    def export_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the options of an export that only this kind has."""


def modality_spec(config: RunConfig) -> ModalitySpec:
    """Return the options of the kind of a run's policy."""
    spec: ModalitySpec = create(MODALITY_SPECS, kind_name(config), {}, label="model.kind")
    return spec
