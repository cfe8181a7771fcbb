"""Filters of the stages and epochs that a command lists, and short formats of epochs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from configs.errors import ConfigError

#: Number of newest epochs whose entries are listed individually; earlier ones are summarized.
RECENT = 3
#: Maximum number of ranges in a list of epochs; a list with more is given as a count.
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
        found = sorted(set(epochs), reverse=True)
        # A summary of a single epoch saves no line.
        whole = self.long or self.epochs or len(found) <= RECENT + 1
        return set(found if whole else found[:RECENT])

    def check_stages(self, known: Iterable[str]) -> None:
        """Refuse names of stages without entries.

        Raises:
            ConfigError: a stage has no entries.
        """
        names = sorted({name for name in known if name})
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
    found: list[list[int]] = []
    for epoch in sorted(epochs):
        if found and found[-1][-1] == epoch - 1:
            found[-1].append(epoch)
        else:
            found.append([epoch])
    return ", ".join(map(span, found)) if len(found) <= _RANGES else f"{len(epochs)} of {span(epochs)}"


def short_names(artifacts: Sequence[str], length: int = 12) -> dict[str, str]:
    """Return an unambiguous prefix of each ``kind/id``: ``length`` characters of the id, or the whole id."""
    short = {artifact: artifact[: artifact.index("/") + 1 + length] for artifact in artifacts}
    named = list(short.values())
    return {artifact: name if named.count(name) == 1 else artifact for artifact, name in short.items()}
