"""The last positions of rows of texts, whose logits are used; a language model's head computes no others. Pure.

Legend: B rows, W positions, K logits of a row that are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowmill.models.devices import moved
from flowmill.models.maths.shared_prompts import SharedPrompts
from flowmill.models.maths.tokens import WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTails:
    """K + 1 successive positions of each row, from at most the one before its first chosen token on. The logits after
    the last one are not used."""

    tail_ids: Tensor
    """(B, K + 1) int64: tokens at these positions."""
    _positions: Tensor
    """(B, K + 1) int64."""
    _width: int
    """W."""

    @staticmethod
    def of(ids: Tensor, firsts: Sequence[int], lengths: Sequence[int]) -> RowTails | None:
        """Return the tails of rows; None: they are the rows themselves.

        Args:
            ids: (B, W) int64, padded on the right.
            firsts: position of the first chosen token of each row.
            lengths: tokens of each row.
        """
        width = ids.shape[1]
        longest = max(length - first for first, length in zip(firsts, lengths, strict=True))
        # As those of whole rows, widths are multiples: a row's log-probs are independent of its neighbors.
        count = -(-longest // WIDTH) * WIDTH
        if count >= width - 1:
            return None
        starts = torch.tensor([min(max(first - 1, 0), width - 1 - count) for first in firsts])
        positions = moved(starts[:, None] + torch.arange(count + 1), ids.device)
        return RowTails(tail_ids=ids.gather(1, positions), _positions=positions, _width=width)

    def tails(self, outputs: Tensor) -> Tensor:
        """Return (B, K, H) outputs at the positions but the last, of outputs (B, W, H); (B, K, H) stay as they are."""
        if outputs.shape[1] != self._width:
            return outputs
        return outputs.gather(1, self._positions[:, :-1, None].expand(-1, -1, outputs.shape[-1]))

    def rows(self, values: Tensor) -> Tensor:
        """Return (B, K + 1) values as (B, W) values of a row's tokens; 0 at the other positions."""
        return values.new_zeros(len(values), self._width).scatter(1, self._positions, values)


#: Outputs whose logits are used, and how the rows are computed; None: all outputs of whole rows.
UsedOutputs = SharedPrompts | RowTails | None
