"""What was predicted beside what was measured: one line each, as a table of Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from flowmill.configs.errors import FlowmillError


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure."""

    label: str
    """What it is, with its unit."""
    predicted: float | None = None
    """What is said without a device; None: nothing."""
    measured: float | str | None = None
    """What the device gave, or why it gave nothing."""
    ok: bool | None = None
    """Whether it is as it must be; None: it is told only."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        if not self.predicted or not isinstance(self.measured, float | int):
            return None
        return self.measured / self.predicted


def between(label: str, predicted: float, measured: float, *, low: float = 0.9, high: float = 1.1) -> Line:
    """Return a line that is right when measured / predicted lies between two bounds."""
    return Line(label=label, predicted=predicted, measured=measured, ok=low <= measured / predicted <= high)


def equal(label: str, predicted: float, measured: float, *, within: float = 0.0) -> Line:
    """Return a line that is right when both are the same, or as near."""
    return Line(label=label, predicted=predicted, measured=measured, ok=abs(measured - predicted) <= within)


class Lines(list[Line]):
    """All lines of a run."""

    @contextmanager
    def told(self, label: str) -> Iterator[None]:
        """Make a line of what fails inside, so that all else is still measured."""
        try:
            yield
        except (FlowmillError, RuntimeError, OSError, ValueError, TypeError, AttributeError, AssertionError) as error:
            first = str(error).strip().splitlines()[:1]
            self.append(Line(label=label, measured=f"{type(error).__name__}: {''.join(first)[:160]}", ok=False))

    @property
    def good(self) -> bool:
        """Whether all that must be right is."""
        return all(line.ok is not False for line in self)

    def markdown(self) -> str:
        """Return the table."""
        head = ["| quantity | predicted | measured | ratio | ok |", "|---|---|---|---|---|"]
        return "\n".join([*head, *map(_row, self)])

    def as_data(self) -> list[dict[str, Any]]:
        """Return plain data."""
        return [{**asdict(line), "ratio": line.ratio} for line in self]


def _row(line: Line) -> str:
    ok = {True: "yes", False: "**no**", None: ""}[line.ok]
    cells: Sequence[Any] = (line.label, line.predicted, line.measured, line.ratio, ok)
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/")
