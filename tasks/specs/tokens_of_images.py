"""Options of samples, training and exports of models that draw images token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowmill.configs.schema import RunConfig
from flowmill.tasks.specs.tokens import TokensSpec


class ImageTokensSpec(TokensSpec):
    """How tokens are sampled, with guidance, and how images are stored."""

    def rollout_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Those of tokens, guidance, and stored media."""
        return {**super().rollout_options(config), **_guided(config), **_stored(config)}

    def given_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Those of tokens, and stored media."""
        return {**super().given_options(config), **_stored(config)}

    def evaluation_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Those of tokens, guidance, and stored media."""
        return {**super().evaluation_options(config), **_guided(config), **_stored(config)}

    def training_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Those of tokens, and the guidance that log-probs belong to; of ingested images there is none."""
        return {**super().training_options(config), **(_guided(config) if config.data is None else {})}

    def value_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Those of tokens, and guidance."""
        return {**super().value_options(config), **_guided(config)}

    def export_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Those of tokens, and guidance."""
        return {**super().export_options(config), **_guided(config)}


def _guided(config: RunConfig) -> dict[str, Any]:
    # It is off up to 1.
    return {"guidance_scale": max(1.0, config.model.guidance_scale)}


def _stored(config: RunConfig) -> dict[str, Any]:
    return {"media": config.rollout.media.fingerprinted()}
