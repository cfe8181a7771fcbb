"""What kind of policy a config has, told without importing one."""

from __future__ import annotations

from configs.schema import RunConfig
from models.policies import FAMILY_KINDS


def kind_name(config: RunConfig) -> str:
    """Return the kind of a run's policy: as the config says, or that of a family of the table."""
    return config.model.kind or FAMILY_KINDS.get(config.model.policy, "diffusion")
