"""Families of policies that tests go through: all of them, or one for each class that several share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import cache
from typing import Any

import pytest

from flowmill.configs.model_families import spec_of
from flowmill.configs.registry import resolve
from flowmill.models.policies import POLICIES

#: Families that are pipelines of diffusers.
PIPELINES = tuple(sorted(name for name in POLICIES if spec_of(name).kind == "diffusion"))

#: Of these the ones whose texts are not padded: their pipelines are given one prompt at a time.
UNPADDED = frozenset({"flux3", "qwen_image21"})

#: Families of slow clips that share all but the images' part with a variant of theirs. That is compared with the
#: pipeline; all else of both is left to campaigns.
SLOW_PAIRS = frozenset({"hunyuan_video15", "ltx2"})


@cache
def representatives(*, of_families: bool = True) -> tuple[str, ...]:
    """Return few families that together have every class from which several families derive.

    Args:
        of_families: whether classes count that are a family themselves; without them, the base classes remain.
    """
    classes: dict[str, type] = {name: resolve(POLICIES, name, label="policy") for name in PIPELINES}
    heirs = Counter(base for cls in classes.values() for base in cls.__mro__)
    left = {base for base, count in heirs.items() if count > 1 and (of_families or base not in classes.values())}
    left -= {classes[name] for name in SLOW_PAIRS}
    chosen = []
    while left:
        # The one with most classes that no other one has yet.
        chosen.append(max(classes, key=lambda name: len(left.intersection(classes[name].__mro__))))
        left.difference_update(classes[chosen[-1]].__mro__)
    return tuple(chosen)


def family_params(quick: Collection[str], families: Collection[str] = PIPELINES) -> list[Any]:
    """Return families as parameters, of which those that are not quick are left to campaigns.

    Tests of one family run in one process: what one of them loads, others need not.
    """
    kept, left = [], [pytest.mark.campaign]
    return [
        pytest.param(name, marks=[pytest.mark.xdist_group(f"family {name}"), *(kept if name in quick else left)])
        for name in families
    ]
