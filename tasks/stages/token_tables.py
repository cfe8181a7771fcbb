"""Stored data of every token of an epoch, laid out for an estimator, and its estimates as columns.

Legend: N samples, M of them that count, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from flowmill.configs.errors import CorruptError
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.advantages.estimators import Earned, TokenEstimator
from flowmill.tasks.advantages.tokens import explained_variance
from flowmill.tasks.algorithms.token_objectives import masked_sum, token_kl
from flowmill.tasks.metrics.samples import shards_of
from flowmill.tasks.modalities.reader import RaggedArray

_LIST = pa.list_(pa.float32())


class TokenTables:
    """Log-probs of chosen tokens, with values and reference log-probs where a run has them, by sample."""

    def __init__(self, ids: Sequence[str], stored: Mapping[str, Sequence[np.ndarray] | None]) -> None:
        """Bind to (N,) sample ids, and to rows of each by name."""
        self._ids, self._stored = ids, stored

    @classmethod
    def read(cls, store: ArtifactStore, inputs: Sequence[ArtifactRef], samples: pa.Table) -> TokenTables:
        """Read an advantage stage's inputs for some samples.

        Args:
            inputs: artifacts, of which trajectories and values are read.
            samples: their order.
        """
        ids = samples.column("sample_id").to_pylist()
        of = {ref.kind: ref for ref in inputs}
        rolled = of["trajectories"]
        table = pa.concat_tables([shard.table for shard in shards_of(store, rolled)])
        stored = {"log_probs": _by_sample(table, "log_probs", ids, rolled)}
        for name in ("values", "reference_log_probs"):
            source = of.get("values")
            stored[name] = None if source is None else _by_sample(read_rows(store, source), name, ids, source)
        return cls(ids, stored)

    def estimate(
        self, estimator: TokenEstimator, scores: Tensor, groups: Tensor, counted: Tensor, *, kl_coef: float
    ) -> tuple[Tensor, dict[str, Any], dict[str, float]]:
        """Return an estimator's result for the samples that count: (M,) float64 mean of the advantages of each sample's
        tokens, a table of ``TOKEN_ADVANTAGES`` with N rows, and figures of the epoch.

        Args:
            scores: (M,) float64.
            groups: (M,) int64.
            counted: (N,) bool, M of them true.
            kl_coef: weight of the KL in this epoch.
        """
        counting = counted.nonzero()[:, 0].tolist()
        log_probs, mask = self._laid_out("log_probs", counting)
        values, reference = (
            None if self._stored[name] is None else self._laid_out(name, counting)[0]
            for name in ("values", "reference_log_probs")
        )
        kl = None if reference is None else token_kl(log_probs, reference, estimator.kl)
        earned = Earned(scores=scores, groups=groups, mask=mask, kl=kl, values=values, kl_coef=kl_coef)
        estimate = estimator.estimate(earned)
        own = {"advantages": estimate.advantages, "returns": estimate.returns}
        columns: dict[str, Any] = {"sample_id": list(self._ids)}
        columns |= {name: self._column(table, mask, counting) for name, table in own.items()}
        columns |= {name: self._stored_column(name, counting) for name in ("values", "reference_log_probs")}
        summary = {"samples": float(len(counting)), "token_count": float(mask.sum())}
        if reference is not None:
            for name in ("k1", "k3"):
                summed = masked_sum(token_kl(log_probs, reference, name), mask)
                summary["kl" if name == "k1" else "kl_k3"] = float(summed.mean())
            summary["kl_coef"] = kl_coef
        if values is not None:
            summary["explained_variance"] = explained_variance(values, estimate.returns, mask)
            summary["value_mean"] = float(values[mask].mean())
            summary["return_mean"] = float(estimate.returns[mask].mean())
        means = masked_sum(estimate.advantages, mask) / mask.sum(-1).clamp(min=1)
        return means, columns, summary

    def _laid_out(self, name: str, counting: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the numbers of samples, (M, T) float64, and where they are, (M, T) bool."""
        rows = self._stored[name]
        assert rows is not None
        chosen = [rows[row] for row in counting]
        sizes = np.array([len(row) for row in chosen])
        mask = np.arange(int(sizes.max(initial=1)))[None, :] < sizes[:, None]
        full = np.zeros(mask.shape)
        full[mask] = np.concatenate(chosen)
        return torch.from_numpy(full), torch.from_numpy(mask)

    def _column(self, table: Tensor, mask: Tensor, counting: Sequence[int]) -> pa.Array:
        """Return (M, T) numbers as a column of N lists, null where a sample does not count."""
        rows: list[np.ndarray | None] = [None] * len(self._ids)
        for place, numbers, chosen in zip(counting, table.float().numpy(), mask.numpy(), strict=True):
            rows[place] = numbers[chosen]
        return pa.array(rows, _LIST)

    def _stored_column(self, name: str, counting: Sequence[int]) -> pa.Array:
        values = self._stored[name]
        if values is None:
            return pa.nulls(len(self._ids), _LIST)
        included = set(counting)
        return pa.array([row if place in included else None for place, row in enumerate(values)], _LIST)


def _by_sample(table: pa.Table, name: str, ids: Sequence[str], ref: ArtifactRef) -> list[np.ndarray] | None:
    """Return a column of lists in the order of some samples; None where it is null."""
    column = table.column(name)
    if column.null_count == len(column):
        return None
    places = {sample: row for row, sample in enumerate(table.column("sample_id").to_pylist())}
    missing = next((sample for sample in ids if sample not in places), None)
    if missing is not None:
        raise CorruptError(f"{ref} has no sample {missing}, which was scored. Run the stage again with --force.")
    rows = RaggedArray(column)
    return [rows[places[sample]] for sample in ids]
