"""Options of samples, training and exports of models that draw images token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.specs.tokens import TokensSpec


class ImageTokensSpec(TokensSpec):
    """How tokens are sampled, with guidance, and how images are stored."""

    def rollout_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Those of tokens, guidance, and stored media."""
        return {**super().rollout_options(plan), **_guided(plan), **_stored(plan)}

    def given_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Those of tokens, and stored media."""
        return {**super().given_options(plan), **_stored(plan)}

    def evaluation_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Those of tokens, guidance, and stored media."""
        return {**super().evaluation_options(plan), **_guided(plan), **_stored(plan)}

    def training_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Those of tokens, and the guidance that log-probs belong to; of ingested images there is none."""
        return {**super().training_options(plan), **(_guided(plan) if plan.config.data is None else {})}

    def value_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Those of tokens, and guidance."""
        return {**super().value_options(plan), **_guided(plan)}

    def export_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Those of tokens, and guidance."""
        return {**super().export_options(plan), **_guided(plan)}


def _guided(plan: ResolvedConfig) -> dict[str, Any]:
    # It is off up to 1.
    return {"guidance_scale": max(1.0, plan.config.model.guidance_scale)}


def _stored(plan: ResolvedConfig) -> dict[str, Any]:
    return {"media": plan.config.rollout.media.fingerprinted()}
