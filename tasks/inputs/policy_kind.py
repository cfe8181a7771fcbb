"""The kind of a config's policy, determined without importing the policy."""

from __future__ import annotations

from flowmill.configs.schema import RunConfig
from flowmill.models.policies import FAMILY_KINDS


def kind_name(config: RunConfig) -> str:
    """Return the kind of a run's policy: ``model.kind``, or that of its family in the table."""
    return config.model.kind or FAMILY_KINDS.get(config.model.policy, "diffusion")


def writes_texts(config: RunConfig) -> bool:
    """Return whether samples of a run's policy are texts."""
    return kind_name(config) == "tokens"
