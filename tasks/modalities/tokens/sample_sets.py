"""Stored texts as training rows: one row is one sample, with a mask of the tokens the policy chose.

Legend: N samples, B rows of a micro-batch, W positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from flowmill.configs.advantages import ReplaySection
from flowmill.models.devices import moved
from flowmill.models.maths.row_tails import RowTails, UsedOutputs
from flowmill.models.maths.shared_prompts import SharedPrompts, SharedWidths, share_prompts
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.tasks.algorithms.base import Batch, Requirements, expect
from flowmill.tasks.algorithms.tokens import TokenBatch, TokenModels
from flowmill.tasks.modalities.proximal import Proximal, importance_weights
from flowmill.tasks.modalities.reader import RaggedArray
from flowmill.tasks.modalities.rows import Units, joint_rows, micro_batches, padded
from flowmill.tasks.modalities.sample_set import Correctable
from flowmill.tasks.modalities.tokens.forwards import chosen_rows, padded_rows
from flowmill.tasks.modalities.tokens.run_prompts import RunPrompts

#: Columns with values per token -> fields of a batch.
_BY_TOKEN = {
    "advantages": "token_advantages",
    "returns": "returns",
    "values": "values",
    "reference_log_probs": "reference",
}


class TextSet(Correctable):
    """Texts of one or more epochs with their advantages."""

    def __init__(
        self,
        shards: Sequence[TrajectoryShard],
        advantages: pa.Table,
        *,
        ahead: int = 0,
        device: torch.device | None = None,
        read: RunPrompts | None,
        shares_prompts: bool = False,
    ) -> None:
        """Bind to the samples; see ``SampleSet``.

        Args:
            shards: see there.
            advantages: see there.
            ahead: see there.
            device: see there.
            read: the run's prompts; None if no batches are needed.
            shares_prompts: texts of a group share the tokens of their prompt.
        """
        super().__init__(shards, advantages, ahead=ahead, device=device)
        if read is not None:
            # Chats of data may be longer before their answer than any prompt.
            masks = (self.reader.array("token_mask", sample) for sample in range(len(self.reader)))
            read = replace(read, longest=max(read.longest, *(int(np.argmax(mask)) for mask in masks), 0))
        self._read, self._shares_prompts = read, shares_prompts
        self._unchanged, self._share = True, 1.0
        self._recomputed: dict[int, np.ndarray] = {}
        self._corrected = False
        columns = {name: self.earned.column(name) for name in _BY_TOKEN if name in self.earned.column_names}
        self._by_token = {name: RaggedArray(each) for name, each in columns.items() if each.null_count < len(each)}

    def says_something(self) -> np.ndarray:
        """Return the mask of samples with a nonzero advantage, of the sample or of any token."""
        advantages = self._by_token.get("advantages")
        if advantages is None:
            return super().says_something()
        return np.array([bool(advantages[row].any()) for row in range(len(self.reader))], np.bool_)

    def units(self, requires: Requirements) -> Units:
        """Return units of rows that must stay together; the live ones of a group where they share their prompt."""
        if not self._shares_prompts or requires.unit != "row":
            return super().units(requires)
        live = self.live(requires)
        groups = [[sample for sample in members if live[sample]] for members in self._groups()]
        return self._early(joint_rows([members for members in groups if members], self.positions()))

    def positions(self) -> np.ndarray:
        """Return 1 for every sample."""
        return np.ones(len(self.reader), np.int64)

    def changed_policy(self) -> None:
        self._unchanged = False

    def begin_update(self, units: Units) -> None:
        """Count the tokens of a whole update, so that row weights do not depend on its batches."""
        counts = self.reader.log_probs.sizes[units.rows[:, 0]]
        self._share = len(units.rows) / max(1, int(counts.sum()))

    @torch.no_grad()
    def recompute(
        self, stale: Units, models: TokenModels, *, size: int, file: IO[bytes] | None, idle: Sequence[Units]
    ) -> Proximal:
        """Return the mean log-prob of each text's tokens; token log-probs are stored in this object."""
        for units in idle:
            models.log_probs(self._batch(units, size))
        for units in micro_batches(stale, size):
            batch = self._batch(units, size)
            log_probs, mask = (values.cpu().numpy() for values in (models.log_probs(batch)[0], batch.mask))
            for number, (sample, _) in enumerate(batch.keys[: batch.count]):
                self._recomputed[sample] = log_probs[number][mask[number]]
        means = {(sample, 0): float(values.mean()) for sample, values in self._recomputed.items()}
        return Proximal(log_probs=means, means=None)

    def correct(self, proximal: Proximal, section: ReplaySection) -> None:
        """Set the importance weights of texts of older policies: the geometric mean of their tokens' ratios."""
        behavior = self.reader.log_probs
        gaps = {key: value - float(behavior[key[0]].mean()) for key, value in proximal.log_probs.items()}
        self._importance, self._corrected = importance_weights(gaps, section), True

    def _batch(self, units: Units, size: int) -> TokenBatch:
        return expect(self.batch(units, padded(len(units.rows), size)), TokenBatch)

    def gather(self, rows: np.ndarray, common: Mapping[str, Any]) -> TokenBatch:
        samples, device = rows[:, 0].tolist(), self.device
        fresh = self.ages[samples] == 0
        assert self._read is not None
        ids = padded_rows([self._tokens(sample, self._read) for sample in samples], device, self._read.widths)
        masks = [self.reader.array("token_mask", sample).astype(bool) for sample in samples]
        numbers = partial(chosen_rows, ids.shape[1], masks, device=device)
        behavior = [self.reader.log_probs[sample] for sample in samples]
        old = behavior
        if self._corrected:
            old = [
                log_probs if new else self._recomputed[sample]
                for sample, log_probs, new in zip(samples, behavior, fresh, strict=True)
            ]
        sampled = [self.reader.array("sampled_log_probs", sample) for sample in samples]
        tables = {field: self._by_token.get(name) for name, field in _BY_TOKEN.items()}
        by_token = {
            field: numbers([table[sample] for sample in samples])
            for field, table in tables.items()
            if table is not None
        }
        fields: dict[str, Any] = {**by_token, **common}
        if self._read.shared is None:
            used: UsedOutputs = _tails(ids, masks)
        else:
            # A batch has room for its own largest group: texts of advantage 0, or all but a pair, are left out.
            widths = replace(self._read.shared, members=1)
            used = self._packed(ids, samples[: common["count"]], masks, widths)
        return TokenBatch(
            ids=ids,
            used=used,
            mask=numbers([each[each] for each in masks]).bool(),
            old_log_probs=numbers(old),
            behavior_log_probs=numbers(behavior),
            sampled_log_probs=numbers(sampled),
            share=torch.full((len(samples),), self._share, device=device),
            own=moved(torch.from_numpy(self._unchanged & (fresh | self._corrected)), device),
            **fields,
        )

    def beginnings(self, samples: np.ndarray) -> np.ndarray:
        """Return a number for the tokens before each text: chats of one prompt may have others after it."""
        return np.array(self._numbers(self.reader.prompt_rows, samples.tolist()))

    def _numbers(self, groups: np.ndarray, samples: Sequence[int]) -> list[int]:
        """Return a number for the group of each sample and the tokens before its text."""
        numbers, chosen = dict[tuple[int, bytes], int](), list[int]()
        for sample in samples:
            tokens, mask = (self.reader.array(name, sample) for name in ("tokens", "token_mask"))
            key = int(groups[sample]), tokens[: int(np.argmax(mask))].tobytes()
            chosen.append(numbers.setdefault(key, len(numbers)))
        return chosen

    def under_prompts_of(self, batch: Batch, samples: Sequence[int]) -> TokenBatch:
        """Return the texts after the prompts of other samples, cut to the widest row of the run."""
        assert self._read is not None
        read, most, ids, masks = self._read, self._read.widths.most, [], []
        for (own, _), other in zip(batch.keys, samples, strict=True):
            mask, other_mask = (self.reader.array("token_mask", each).astype(bool) for each in (own, other))
            text, prompt = (self.reader.array("tokens", each) for each in (own, other))
            begins, ends = int(np.argmax(mask)), int(np.argmax(other_mask))
            joined = np.concatenate([prompt[:ends], text[begins:]])[:most]
            name = self.reader.prompt_ids[self.reader.prompt_rows[other]]
            ids.append(read.with_images(name, joined, partial(self.reader.id_and_metadata, other)))
            masks.append(np.concatenate([np.zeros(ends, np.bool_), mask[begins:]])[:most])
        rows = padded_rows(ids, self.device, read.widths)
        chosen = chosen_rows(rows.shape[1], masks, [each[each] for each in masks], device=self.device).bool()
        return replace(expect(batch, TokenBatch), ids=rows, mask=chosen, reference=None, used=_tails(rows, masks))

    def _tokens(self, sample: int, read: RunPrompts) -> np.ndarray | Sequence[int]:
        prompt = self.reader.prompt_ids[self.reader.prompt_rows[sample]]
        return read.with_images(
            prompt, self.reader.array("tokens", sample), partial(self.reader.id_and_metadata, sample)
        )

    def _packed(
        self, ids: Tensor, samples: Sequence[int], masks: Sequence[np.ndarray], widths: SharedWidths
    ) -> SharedPrompts:
        """Pack the rows of samples, which the further rows of ``ids`` fill up with copies of the last one."""
        count, groups = len(samples), self._numbers(self.reader.groups, samples)
        prompts, texts = ([int(length(mask)) for mask in masks[:count]] for length in (np.argmax, len))
        return share_prompts(ids[:count], prompts, texts, groups, widths).filled(len(ids))


def _tails(ids: Tensor, masks: Sequence[np.ndarray]) -> RowTails | None:
    """Return the tails of rows, from their masks of chosen tokens."""
    return RowTails.of(ids, [int(np.argmax(mask)) for mask in masks], [len(mask) for mask in masks])
