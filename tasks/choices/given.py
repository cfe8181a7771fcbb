"""The rows of data that an epoch trains on, the view of each, and its caption. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flowmill.tasks.runs.seeds import derive, drawn, epoch_prompts


def epoch_groups(own: Sequence[str], prior: Sequence[str], most: int | None, *, seed: int, epoch: int) -> list[str]:
    """Return the groups of an epoch: slices of one permutation per pass, and as many of ``prior``, at most all.

    Args:
        own: groups of the rows to train on.
        prior: groups of rows to keep what the policy knows.
        most: groups of ``own`` in an epoch; all when absent.
        seed: seed of the run.
        epoch: the epoch, from 1.
    """
    size = min(most or len(own), len(own))
    groups = [own[index] for index in epoch_prompts(len(own), size, seed=seed, epoch=epoch)]
    if count := min(size, len(prior)):
        others = epoch_prompts(len(prior), count, seed=derive(seed, "prior"), epoch=epoch)
        groups += [prior[index] for index in others]
    return groups


def drawn_variants(
    variants: Sequence[Mapping[str, Any]], *, empty: float, seed: int, epoch: int
) -> tuple[list[int], list[str]]:
    """Return the numbers of the samples that an epoch trains, those of one view of each row, and their prompts' ids.

    Args:
        variants: a row of ``schema.VARIANTS`` for each sample.
        empty: share of rows that have no caption.
        seed: seed of the run.
        epoch: the epoch, from 1.
    """
    samples = Counter(each["row"] for each in variants)
    per_view = Counter(each["row"] for each in variants if each["view"] == 0)
    numbers, prompts = list[int](), list[str]()
    for number, each in enumerate(variants):
        # The samples of a pair have equal draws.
        draw = drawn(seed, "variant", epoch, each["row"])
        view = int(draw.integers(samples[each["row"]] // per_view[each["row"]]))
        caption = each["captions"][int(draw.integers(len(each["captions"])))]
        without = draw.random() < empty
        if each["view"] == view:
            numbers.append(number)
            prompts.append(each["empty"] if without else caption)
    return numbers, prompts
