"""Gradients of one reward with respect to the final latents of an epoch's samples: the decoder's and the reward's work.

Training on them needs neither, and as often as it likes: other learning rates, or more epochs of replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flowmill.configs.errors import ConfigError
from flowmill.models.policies.parts import Part
from flowmill.models.rewards.base import Needs
from flowmill.models.rewards.factory import needs_of
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.artifacts.row_digest import Contents
from flowmill.storage.trajectories.gradients import write_gradients
from flowmill.tasks.inputs.components import decode_rows
from flowmill.tasks.modalities.gradients import RewardGradientRequest, RewardGradientResult
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.scoring import Scoring
from flowmill.tasks.stages.stage import Output, Shard

_FIGURES = ("value", "rms")


class GradientStage(Scoring):
    """A reward followed back through the decoder, shard by shard; no denoiser is called."""

    def take_slot(self) -> None:
        """Find the reward, which must be optimized; its weight belongs to training."""
        algorithm = self.config.optimize.algorithm.name
        if not self.plan.has_gradients:
            raise ConfigError(
                f"This run has no stage 'gradient': its optimize.algorithm '{algorithm}' trains on no gradients of "
                "rewards. Those of 'reward_gradient' have it."
            )
        self.section = self.facts.reward_section(self.slot)
        if self.section not in self.config.rewards:
            raise ConfigError(
                f"There is no gradient of '{self.slot}': monitors are only watched. Name one of 'rewards'."
            )

    def upstream(self) -> tuple[Node, ...]:
        """The trajectories, which say how the model that sampled them decodes."""
        return (Node(self.epoch, "rollout"),)

    @property
    def parts(self) -> frozenset[Part]:
        needs = needs_of(self.section.name, self.section.options)
        return frozenset() if needs.media == "latents" else frozenset({Part.VAE})

    @property
    def on_ranks(self) -> bool:
        """True where the decoder is needed, or the reward is with an accelerator."""
        return bool(self.parts) or super().on_ranks

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """Of rows that are decoded, scored and followed back at once."""
        return {**super().sizes, "decode_batch_size": decode_rows(self.config)}

    def run(self, shard: Shard, folder: Path) -> Output:
        """Follow the reward back to the samples of one shard."""
        self.host.use_threads()
        batch, table = self.read(shard, Needs(media="latents"))
        rows = self.requested_rows(batch)
        following = RewardGradientRequest(config=self.config, host=self.host, section=self.section)
        gradients = self.modality.follow(following, batch.take(rows)) if rows else None
        values, sizes, directions = self._spread(rows, gradients, len(batch))
        names = {name: table.column(name).to_pylist() for name in ("sample_id", "prompt_id", "group_id")}
        columns = {**names, "value": pa.array(values, mask=np.isnan(values)), "rms": sizes}
        labels = {**self.labels(), "artifact": str(self.inputs()[0])}
        write_gradients(folder, columns, directions, labels)

        def content() -> str:
            contents = Contents()
            for row, name in enumerate(names["sample_id"]):
                array = directions[row]
                plain = {"sample_id": name, "value": repr(values[row]), "rms": repr(sizes[row])}
                contents.add(plain, {} if array is None else {"gradient": array})
            return str(contents)

        figures = {
            "scored": len(rows),
            **({} if gradients is None else {"value": float(gradients.values.mean(dtype=np.float64))}),
        }
        return Output(
            rows=len(batch), summary={**figures, "rms": float(sizes.sum() / max(1, len(rows)))}, content=content
        )

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Average over the samples of all shards that were followed."""
        parts = [record.summary for record in records if record.summary["scored"]]
        count = sum(part["scored"] for part in parts)
        return {name: sum(part[name] * part["scored"] for part in parts) / count for name in _FIGURES if count}

    def _spread(
        self, rows: Sequence[int], gradients: RewardGradientResult | None, count: int
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]:
        """Return value, size and direction of each of ``count`` samples, of which only ``rows`` were followed."""
        values, sizes = np.full(count, np.nan, np.float32), np.zeros(count, np.float32)
        directions: list[np.ndarray | None] = [None] * count
        for number, row in enumerate(rows):
            assert gradients is not None
            gradient = gradients.gradients[number].astype(np.float64)
            size = np.sqrt(np.mean(gradient**2))
            values[row], sizes[row] = gradients.values[number], size
            if sizes[row] > 0:
                directions[row] = (gradient / size).astype(self.config.rollout.latents_dtype)
        return values, sizes, directions
