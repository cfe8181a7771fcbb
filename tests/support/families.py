"""Which model families tests go through."""

from __future__ import annotations

from models.policies import FAMILY_KINDS, POLICIES

#: Families that are pipelines of diffusers.
PIPELINES = tuple(sorted(name for name in POLICIES if name not in FAMILY_KINDS))
