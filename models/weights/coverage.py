"""Checks that stored parts cover each number of a tensor once: memory is allocated before it is filled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

#: Weights have five dimensions at most; the work is exponential in them.
MAX_DIMENSIONS = 6


def check_covered(size: Sequence[int], chunks: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Check that boxes tile a tensor, without gaps, overlaps or points outside; raise ValueError.

    The number of boxes over each point is a step function, determined by its steps: the corners of the boxes with signs
    (+ where a box begins, - where it ends, multiplied over the dimensions). The boxes tile the tensor if and only if
    their corners add up to those of the tensor. The work is linear in the number of boxes.

    ``chunks``: offsets and sizes of its parts.
    """
    if len(size) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {len(size)} dimensions, and {MAX_DIMENSIONS} are read at most")
    steps: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in chunks:
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise ValueError(f"a part of a tensor of shape {tuple(size)} has {len(sizes)} dimensions")
        _add(steps, offsets, sizes, 1)
    _add(steps, [0] * len(size), size, -1)
    odd = next((corner for corner, count in sorted(steps.items()) if count), None)
    if odd is not None:
        kind = "overlap or lie outside of it" if steps[odd] > 0 else "leave a gap"
        raise ValueError(f"the parts of a tensor of shape {tuple(size)} {kind} at {odd}")


def _add(steps: Counter[tuple[int, ...]], offsets: Sequence[int], sizes: Sequence[int], sign: int) -> None:
    if 0 in sizes:
        return
    ends = [(offset, offset + extent) for offset, extent in zip(offsets, sizes, strict=True)]
    for choice in product((0, 1), repeat=len(sizes)):
        corner = tuple(end[chosen] for end, chosen in zip(ends, choice, strict=True))
        steps[corner] += -sign if sum(choice) % 2 else sign
