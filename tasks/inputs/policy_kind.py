"""The kind of a config's policy, determined without importing the policy."""

from __future__ import annotations

from flowmill.configs.model_families import spec_of
from flowmill.configs.schema import RunConfig


def kind_name(config: RunConfig) -> str:
    """Return the kind of a run's policy: ``model.kind``, or that of its family in the table."""
    return config.model.kind or spec_of(config.model.policy).kind


def writes_texts(config: RunConfig) -> bool:
    """Return whether samples of a run's policy are texts."""
    return kind_name(config) == "tokens"
