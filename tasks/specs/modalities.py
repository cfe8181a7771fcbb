"""Options of stages that only one kind of policy has: its settings that change results.

``flowmill.tasks.modalities`` has the work of a kind: sampling, training, reports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from flowmill.configs.registry import Table
from flowmill.tasks.inputs.resolved import ResolvedConfig

MODALITIES = Table(
    {
        "diffusion": "flowmill.tasks.modalities.diffusion.modality:Diffusion",
        "tokens": "flowmill.tasks.modalities.tokens.modality:Tokens",
        "image_tokens": "flowmill.tasks.modalities.tokens.image_modality:ImageTokens",
    },
    like="flowmill.tasks.modalities.modality:Modality",
)
MODALITY_SPECS = Table(
    {
        "diffusion": "flowmill.tasks.specs.diffusion:DiffusionSpec",
        "tokens": "flowmill.tasks.specs.tokens:TokensSpec",
        "image_tokens": "flowmill.tasks.specs.tokens:ImageTokensSpec",
    },
    like="flowmill.tasks.specs.modalities:ModalitySpec",
)


class ModalitySpec(ABC):
    """The options of stages that only one kind of policy has. All are plain JSON values, by option."""

    @abstractmethod
    def encoding_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Return the options of prompt conditioning, besides the base model."""

    @abstractmethod
    def rollout_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Return the options of a rollout's samples, besides policy, prompts, seed and epoch."""

    def redrawn_options(self, plan: ResolvedConfig, epoch: int) -> Mapping[str, Any]:
        """Return options that tell the rollout of an epoch from one that earlier versions drew or ordered otherwise."""
        return {}

    @abstractmethod
    def given_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Return the options of ingested samples, besides their content, the base model and the store's format."""

    @abstractmethod
    def evaluation_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Return the options of an evaluation's samples, besides policy, prompts, seed and number."""

    @abstractmethod
    def training_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Return the options of training, besides its inputs and the section ``optimize``."""

    def value_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Return the options of values of samples, for kinds and estimators that have values."""
        return {}

    @abstractmethod
    def export_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Return the options of an export that only this kind has."""
