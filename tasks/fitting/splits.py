"""Held-out judgments: no prompt, image or text of them is seen in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from configs.errors import ConfigError
from configs.fingerprint import hash_text
from tasks.algorithms.resampling import FEWEST
from tasks.fitting.judgments import Judgment


def held_out(rows: Sequence[Judgment], share: float, seed: int, *, texts: bool = False) -> list[bool]:
    """Return, for each judgment, whether it is held out.

    Judgments with a common prompt, image or text stay on one side. A hash of prompt and seed decides the side, so that
    it does not depend on the order of rows. Short texts that answer many prompts would bind all of these together; if
    too few judgments could be held out, a text with a prompt stays with its prompt alone.

    Args:
        rows: the judgments.
        share: share of judgments to hold out, at most.
        seed: seed of the choice.
        texts: whether they are about texts.

    Raises:
        ConfigError: a side would have too few judgments.
    """
    found, largest = _apart(rows, share, seed, _keys)
    if texts and min(sum(found), len(rows) - sum(found)) < FEWEST:
        found, largest = _apart(rows, share, seed, _prompt)
    check_sizes(
        len(rows) - sum(found),
        sum(found),
        f"Judge more prompts, or raise 'share'; the largest set of judgments with common prompts or media has "
        f"{largest} of {len(rows)}.",
    )
    return found


def _apart(
    rows: Sequence[Judgment], share: float, seed: int, keys: Callable[[Judgment], list[str]]
) -> tuple[list[bool], int]:
    """Return whether each judgment is held out, and the size of the largest group that shares keys."""
    groups = _connected(rows, keys)
    names = [min(hash_text(f"{seed}:{key}") for row in group for key in keys(rows[row])) for group in groups]
    found, left = [False] * len(rows), round(share * len(rows))
    for _, group in sorted(zip(names, groups, strict=True)):
        if len(group) <= left:
            left -= len(group)
            for row in group:
                found[row] = True
    return found, max(map(len, groups), default=0)


def check_sizes(train: int, heldout: int, remedy: str) -> None:
    """Check that both sides have enough judgments.

    Raises:
        ConfigError: one has fewer than ``FEWEST``.
    """
    if min(train, heldout) < FEWEST:
        raise ConfigError(
            f"data: there are {train} judgments to train on and {heldout} to measure on; each side needs {FEWEST}, as "
            f"fewer say nothing about other prompts. {remedy}"
        )


def check_leaks(train: Sequence[Judgment], heldout: Sequence[Judgment], *, texts: bool = False) -> None:
    """Check that no prompt, image or text of held-out judgments is among those to train on.

    Texts with a prompt may occur again with another one: short answers do.

    Raises:
        ConfigError: one is; the message names both rows.
    """
    keys = _prompt if texts else _keys
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


def _prompt(row: Judgment) -> list[str]:
    return _keys(row)[:1] if row.prompt else _keys(row)


def _connected(rows: Sequence[Judgment], keys: Callable[[Judgment], list[str]]) -> list[list[int]]:
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
