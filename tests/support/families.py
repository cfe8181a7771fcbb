"""Which model families tests go through."""

from __future__ import annotations

from models.policies import FAMILY_KINDS, POLICIES

#: Families that are pipelines of diffusers.
PIPELINES = tuple(sorted(name for name in POLICIES if name not in FAMILY_KINDS))

#: Of these the ones whose texts are not padded: their pipelines are given one prompt at a time.
UNPADDED = frozenset({"flux3", "minimax_h3", "qwen_image21"})
