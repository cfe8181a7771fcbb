"""Held-out judgments: no prompt, image or text of them is seen in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import hash_text
from flowmill.tasks.fitting.judgments import Judgment

#: Judgments that each side needs at least.
LEAST = 20


def held_out(rows: Sequence[Judgment], share: float, seed: int, *, texts: bool = False) -> list[bool]:
    """Return, for each judgment, whether it is held out.

    Judgments with a common prompt, image or text stay on one side. A hash of prompt and seed decides the side, so that
    it does not depend on the order of rows. Short texts that answer many prompts would bind all of these together; if
    too few judgments could be held out, a text with a prompt stays with its prompt alone.

    Args:
        share: share of judgments to hold out, at most.
        seed: seed of the choice.
        texts: whether they judge texts.
    """
    chosen, largest = _apart(rows, share, seed, _keys)
    if texts and min(sum(chosen), len(rows) - sum(chosen)) < LEAST:
        chosen, largest = _apart(rows, share, seed, prompt_or_items)
    check_sizes(
        len(rows) - sum(chosen),
        sum(chosen),
        f"Judge more prompts, or raise 'share'; the largest set of judgments with common prompts or media has "
        f"{largest} of {len(rows)}.",
    )
    return chosen


def _apart(
    rows: Sequence[Judgment], share: float, seed: int, keys: Callable[[Judgment], list[str]]
) -> tuple[list[bool], int]:
    """Return whether each judgment is held out, and the size of the largest group that shares keys."""
    groups = connected(rows, keys)
    names = [min(hash_text(f"{seed}:{key}") for row in group for key in keys(rows[row])) for group in groups]
    chosen, left = [False] * len(rows), round(share * len(rows))
    for _, group in sorted(zip(names, groups, strict=True)):
        if len(group) <= left:
            left -= len(group)
            for row in group:
                chosen[row] = True
    return chosen, max(map(len, groups), default=0)


def check_sizes(train: int, heldout: int, remedy: str) -> None:
    """Check that both sides have enough judgments."""
    if min(train, heldout) < LEAST:
        raise ConfigError(
            f"data: there are {train} judgments to train on and {heldout} to measure on; each side needs {LEAST}, as "
            f"fewer say nothing about other prompts. {remedy}"
        )


def check_leaks(train: Sequence[Judgment], heldout: Sequence[Judgment], *, texts: bool = False) -> None:
    """Check that no prompt, image or text of held-out judgments is among those to train on.

    Texts with a prompt may occur again with another one: short answers do.
    """
    keys = prompt_or_items if texts else _keys
    seen = {key: row for row in train for key in keys(row)}
    for row in heldout:
        for key in keys(row):
            if key in seen:
                label = f"the prompt {row.prompt!r}" if key == _keys(row)[0] and row.prompt else "an image or text"
                raise ConfigError(
                    f"heldout: {row.where} has {label} of {seen[key].where}, so it would measure memory. Remove one of "
                    "the two, or 'heldout', for a split by content."
                )


def _keys(row: Judgment) -> list[str]:
    return [*([f"prompt {row.prompt}"] if row.prompt else []), *row.items]


def prompt_or_items(row: Judgment) -> list[str]:
    """Return what binds a judgment to others: its prompt, or its images or texts if it has none."""
    return _keys(row)[:1] if row.prompt else _keys(row)


def connected(rows: Sequence[Judgment], keys: Callable[[Judgment], list[str]]) -> list[list[int]]:
    """Return the rows in groups that share no prompt, image or text."""
    parents: dict[str, str] = {}

    def root(key: str) -> str:
        while parents.setdefault(key, key) != key:
            parents[key] = parents[parents[key]]
            key = parents[key]
        return key

    for row in rows:
        first, *others = keys(row)
        for key in others:
            parents[root(key)] = root(first)
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(root(keys(row)[0]), []).append(number)
    return list(groups.values())
