"""Divides texts into forwards of a fixed size, with the layout of training.

Legend: B rows of a forward, W positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from flowmill.models.devices import moved
from flowmill.models.maths.row_tails import RowTails, UsedOutputs
from flowmill.models.maths.shared_prompts import SharedWidths, share_prompts
from flowmill.models.maths.tokens import Widths

Row = Sequence[int] | np.ndarray


def padded_rows(rows: Sequence[Row], device: torch.device, widths: Widths) -> Tensor:
    """Return rows of token ids padded on the right, (B, W) int64, on a device.

    Args:
        rows: token ids of each row.
        device: target device.
        widths: the possible widths.
    """
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), widths.of(int(lengths.max()))), np.int64)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return moved(torch.from_numpy(ids), device)


def forwards(
    rows: Sequence[Row],
    prompts: Sequence[int],
    device: torch.device,
    *,
    size: int,
    widths: Widths,
    shared: SharedWidths | None,
) -> Iterator[tuple[list[int], Tensor, UsedOutputs]]:
    """Yield the numbers of rows, their (B, W) ids, and the outputs whose logits are used: of rows packed by prompt if
    they share prompts, else of tails.

    All forwards have the same size, as kernels differ with it: the last rows, or the last group, are repeated.

    Args:
        rows: token ids of each row, prompt first.
        prompts: tokens of each row's prompt.
        device: target device.
        size: rows of a forward.
        widths: the possible widths.
        shared: those of packed rows; None: rows are not packed.
    """
    units, each = [[number] for number in range(len(rows))], size
    if shared is not None:
        of_prompt = [tuple(row[:length]) for row, length in zip(rows, prompts, strict=True)]
        equal = [list(group) for _, group in groupby(range(len(rows)), of_prompt.__getitem__)]
        most = shared.members
        units = [group[start : start + most] for group in equal for start in range(0, len(group), most)]
        each = max(1, size // most)
    filled = [*units, *[units[-1]] * (-len(units) % each)]
    for start in range(0, len(filled), each):
        chosen = filled[start : start + each]
        numbers = [number for unit in chosen for number in unit]
        ids = padded_rows([rows[number] for number in numbers], device, widths)
        owners, texts = [prompts[number] for number in numbers], [len(rows[number]) for number in numbers]
        if shared is None:
            yield numbers, ids, RowTails.of(ids, owners, texts)
        else:
            groups = [place for place, unit in enumerate(chosen) for _ in unit]
            yield numbers, ids, share_prompts(ids, owners, texts, groups, shared)


def chosen_rows(width: int, masks: Sequence[np.ndarray], values: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Return values of the tokens of a mask as rows, (B, W) float32, 0 elsewhere.

    Args:
        width: W.
        masks: bool, one value per token of each row.
        values: one value per token of each row's mask.
        device: target device.
    """
    full = np.zeros((len(masks), width), np.float32)
    for row, mask, each in zip(full, masks, values, strict=True):
        row[np.flatnonzero(mask)] = each
    return moved(torch.from_numpy(full), device)
