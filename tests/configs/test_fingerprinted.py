"""A setting that came later leaves fingerprints from before as they were: at its default it is left out."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from flowmill.configs.advantages import AdvantageSection
from flowmill.configs.base import Later, Section


class Inner(Section):
    """A section inside another."""

    old: int = 1
    new: Annotated[int, Later()] = 2


class Outer(Section):
    """A section with one inside."""

    inner: Inner = Inner()
    maybe: Annotated[Inner | None, Later()] = None
    free: int = 3


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {"inner": {"old": 1}}),
        ({"inner": {"new": 5}}, {"inner": {"old": 1, "new": 5}}),
        ({"inner": {"old": 1, "new": 2}, "free": 4}, {"inner": {"old": 1}}),
        ({"maybe": {}}, {"inner": {"old": 1}, "maybe": {"old": 1}}),
    ],
)
def test_later_settings_count_where_they_differ_from_their_default(settings: Any, wanted: Any) -> None:
    assert Outer(**settings).fingerprinted({"free"}) == wanted


def test_settings_without_the_mark_always_count() -> None:
    assert AdvantageSection().fingerprinted().keys() == {
        *("aggregation", "std", "epsilon", "floor", "unbiased", "buffer", "min_count", "mode", "best_of", "clip"),
        *("threshold", "below", "group_mean_min", "group_mean_max", "kl_coef"),
    }
