"""Filters of the stages and epochs that a command lists, and short formats of epochs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from flowmill.configs.errors import ConfigError

#: Number of newest epochs whose entries are listed individually; earlier ones are summarized.
RECENT = 3
#: Maximum number of ranges in a list of epochs; a list with more is shown as a count.
_RANGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFilter:
    """A filter of listed entries."""

    stages: Collection[str] = ()
    """Names of stages; all when empty."""
    epochs: Collection[int] = ()
    """Epochs; all when empty."""
    long: bool = False
    """List every epoch and every column."""

    def takes(self, stage: str, epochs: Iterable[int]) -> bool:
        """Return whether to list an entry of a stage and some epochs."""
        return (not self.stages or stage in self.stages) and (
            not self.epochs or not set(epochs).isdisjoint(self.epochs)
        )

    def recent(self, epochs: Iterable[int]) -> set[int]:
        """Return the epochs whose entries are listed individually: the newest, or all if requested."""
        newest = sorted(set(epochs), reverse=True)
        # A summary of a single epoch saves no line.
        whole = self.long or self.epochs or len(newest) <= RECENT + 1
        return set(newest if whole else newest[:RECENT])

    def check_stages(self, existing: Iterable[str]) -> None:
        """Refuse names of stages without entries."""
        names = sorted({name for name in existing if name})
        for stage in self.stages:
            if stage not in names:
                raise ConfigError(f"--stage '{stage}': there is no such stage here. There are {', '.join(names)}.")


def span(epochs: Collection[int]) -> str:
    """Return the first and the last of some epochs as text, such as ``0-9``; empty if there are none."""
    if not epochs:
        return ""
    first, last = min(epochs), max(epochs)
    return str(first) if first == last else f"{first}-{last}"


def ranges(epochs: Collection[int]) -> str:
    """Return some epochs as text: ``0-2, 5``, or ``7 of 0-12`` if there are many gaps."""
    groups: list[list[int]] = []
    for epoch in sorted(epochs):
        if groups and groups[-1][-1] == epoch - 1:
            groups[-1].append(epoch)
        else:
            groups.append([epoch])
    return ", ".join(map(span, groups)) if len(groups) <= _RANGES else f"{len(epochs)} of {span(epochs)}"


def short_names(artifacts: Sequence[str], length: int = 12) -> dict[str, str]:
    """Return an unambiguous prefix of each ``kind/id``: ``length`` characters of the id, or the whole id."""
    short = {artifact: artifact[: artifact.index("/") + 1 + length] for artifact in artifacts}
    named = list(short.values())
    return {artifact: name if named.count(name) == 1 else artifact for artifact, name in short.items()}
