"""Points of metric curves, and the order in which MLflow shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Section of the rewards that compare runs. MLflow sorts sections by name, so this name must sort first.
ACHIEVED = "achieved"
#: Sections of scores, in the order of MLflow's tables; times come last.
_SCORES, _TIMES = (ACHIEVED, "eval", "reward", "monitor"), "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of one curve."""

    key: str
    """Name of the curve."""
    value: float
    step: int
    """Epoch, or optimizer update."""
    split: str | None = None
    """Prompt list of a score."""


def scores_first(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return points with scores first, held-out prompts before others, and times last.

    MLflow's table of a run, and the initial axes of its run comparison, keep the order in which metrics were first
    logged.
    """

    def place(point: Point) -> tuple[int, bool]:
        section, _, name = point.key.partition("/")
        number = _SCORES.index(section) if section in _SCORES else len(_SCORES) + (section == _TIMES)
        return number, not name.startswith("heldout")

    return tuple(sorted(points, key=place))
