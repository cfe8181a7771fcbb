"""Rows of texts packed so that the texts of a group share the tokens of their prompt. Pure.

A model computes a prompt once and the completions after it, each of which attends to the prompt and to itself. This
halves the tokens of a group of four with completions as long as the prompt; results are those of separate rows up to
rounding (prefix sharing as in Prefix Grouper, arXiv 2506.05433).

Legend: B rows, W positions, G groups, N rows of a group, P prompt positions, C completion positions, L = P + N C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowmill.models.maths.tokens import WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWidths:
    """Determines the widths of packed rows: multiples of ``WIDTH`` up to those of the run's longest texts."""

    prompt: int
    """Tokens of the run's longest prompt."""
    completion: int
    """The most tokens of a completion."""
    members: int
    """The least rows of a group that packed rows have room for."""

    def of(self, prompt: int, completion: int) -> tuple[int, int]:
        """Return the widths of prompts and completions for the longest of a batch."""
        pairs = ((prompt, self.prompt), (completion, self.completion))
        first, second = (max(length, min(most, -(-length // WIDTH) * WIDTH)) for length, most in pairs)
        return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """The packed form of B rows, and the way back."""

    ids: Tensor
    """(G, L) int64: the prompt, padded on the left, then the completions, each padded on the right."""
    positions: Tensor
    """(G, L) int64 positions of the tokens within their own text."""
    visible: Tensor
    """(G, 1, L, L) bool: the tokens to which each token attends."""
    tail_ids: Tensor
    """(B, 1 + C) int64: the last token of the prompt and the completion of each row."""
    _groups: Tensor
    """(B,) int64 group of each row."""
    _tails: Tensor
    """(B, 1 + C) int64 packed positions of ``tail_ids``."""
    _places: Tensor
    """(B, W) int64 index into ``tail_ids`` of each token of a row; 0 for tokens of the prompt and padding."""

    @property
    def output_positions(self) -> Tensor:
        """The (1 + N C,) packed positions whose outputs are used: the last of the prompt and all of completions."""
        first = int(self._tails[0, 0])
        return torch.arange(first, self.ids.shape[1], device=self.ids.device)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return ``visible`` as a term of attention scores: 0, or the lowest number of a dtype."""
        lowest = torch.finfo(dtype).min
        return torch.zeros(self.visible.shape, dtype=dtype, device=self.ids.device).masked_fill(~self.visible, lowest)

    def tails(self, packed: Tensor) -> Tensor:
        """Return the (B, 1 + C, ...) outputs at ``tail_ids`` of outputs (G, 1 + N C, ...) at ``output_positions``."""
        outputs: Tensor = packed[self._groups[:, None], self._tails - self._tails[0, 0]]
        return outputs

    def filled(self, size: int) -> SharedPrompts:
        """Return the packed form of ``size`` rows, of which those after the B rows equal the last one."""
        rows = torch.arange(size, device=self.ids.device).clamp(max=len(self._groups) - 1)
        own = {name: getattr(self, name)[rows] for name in ("tail_ids", "_groups", "_tails", "_places")}
        return replace(self, **own)

    def packed(self, values: Tensor) -> Tensor:
        """Return (B, W) values of a row's tokens as (G, L) values of ``ids``; 0 for those of the prompt and padding."""
        own = torch.where(self._places > 0, values, 0.0)
        tails = values.new_zeros(self.tail_ids.shape).scatter(1, self._places, own)
        # The last token of the prompt belongs to all rows of a group.
        return values.new_zeros(self.ids.shape).index_put((self._groups[:, None], self._tails[:, 1:]), tails[:, 1:])

    def rows(self, tails: Tensor) -> Tensor:
        """Return (B, 1 + C) values of ``tail_ids`` as (B, W) values of a row's tokens; 0 for those of the prompt."""
        return torch.where(self._places > 0, tails.gather(1, self._places), 0.0)


#: Number of a prompt among the texts of packed tokens; that of padding is -1.
_PROMPT = 1 << 30


def _visible(texts: Tensor) -> Tensor:
    """Return the (G, 1, L, L) tokens to which each token attends, from the number of each token's text, (G, L)."""
    order = torch.arange(texts.shape[1], device=texts.device)
    same = (texts[:, :, None] == texts[:, None, :]) | (texts == _PROMPT)[:, None, :]
    earlier = (order <= order[:, None]) & (texts >= 0)[:, :, None] & (texts >= 0)[:, None, :]
    # Padding attends to itself, as a softmax over no token is not a number.
    return ((same & earlier) | (order == order[:, None]))[:, None]


def share_prompts(
    ids: Tensor, prompts: Sequence[int], texts: Sequence[int], groups: Sequence[int], widths: SharedWidths
) -> SharedPrompts:
    """Pack rows whose prompts are equal.

    Args:
        ids: (B, W) int64, padded on the right.
        prompts: tokens of the prompt of each row, at least one.
        texts: tokens of prompt and completion of each row.
        groups: group of each row, rows of a group in succession; its rows have the same prompt.
        widths: the possible widths.
    """
    device, rows = ids.device, torch.arange(len(prompts), device=ids.device)
    starts = [row for row, group in enumerate(groups) if row == 0 or group != groups[row - 1]]
    sizes = [stop - start for start, stop in zip(starts, [*starts[1:], len(groups)], strict=True)]
    longest = max(1, *(text - own for text, own in zip(texts, prompts, strict=True)))
    prompt, completion = widths.of(max(prompts), longest)
    members = max(widths.members, *sizes)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
    member = torch.tensor([place for size in sizes for place in range(size)], device=device)
    own = torch.tensor(list(prompts), device=device)
    length = torch.tensor(list(texts), device=device) - own

    # The rows' completions, (B, C), read from the rows at prompt + 0, 1, ...
    places = torch.arange(completion, device=device)
    indices = (own[:, None] + places).clamp(max=ids.shape[1] - 1)
    real = places < length[:, None]
    completions = torch.where(real, ids.gather(1, indices), 0)

    total = prompt + members * completion
    packed = torch.zeros(len(sizes), total, dtype=torch.int64, device=device)
    positions, text_of = torch.zeros_like(packed), torch.full_like(packed, -1)
    heads = torch.tensor(starts, device=device)
    # Prompts of all lengths end at the same position.
    back = torch.arange(prompt, device=device) - (prompt - own[heads])[:, None]
    packed[:, :prompt] = torch.where(back >= 0, ids[heads].gather(1, back.clamp(min=0)), 0)
    positions[:, :prompt] = back.clamp(min=0)
    text_of[:, :prompt] = torch.where(back >= 0, _PROMPT, -1)
    at = prompt + member[:, None] * completion + places
    packed[group[:, None], at] = completions
    positions[group[:, None], at] = own[:, None] + places
    text_of[group[:, None], at] = torch.where(real, member[:, None], -1)

    last = torch.full_like(own, prompt - 1)[:, None]
    inner = torch.arange(ids.shape[1], device=device) - own[:, None] + 1
    is_own = (inner > 0) & (inner <= length[:, None])
    return SharedPrompts(
        ids=packed,
        positions=positions,
        visible=_visible(text_of),
        tail_ids=torch.cat([ids[rows, own - 1][:, None], completions], 1),
        _groups=group,
        _tails=torch.cat([last, at], 1),
        _places=torch.where(is_own, inner, 0),
    )
