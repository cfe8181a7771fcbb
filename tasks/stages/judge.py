"""Scores an evaluation, and shows what it scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.rewards.base import Batch, Scores
from storage.records import ShardRecord
from storage.trajectories.base import TrajectoryShard
from tasks.figures.scores import mean_figures
from tasks.figures.texts import Text, write_texts
from tasks.stages.scoring import Scoring


class JudgeStage(Scoring):
    """A reward or judge over the samples of an evaluation; each prompt list is a shard, with some to look at."""

    def scored(self, opened: TrajectoryShard, batch: Batch, scores: Scores, folder: Path) -> None:
        """Show the first samples with prompt, what the reward read, and score."""
        count = min(self.config.evaluate.images, len(scores.values))
        notes = scores.notes if scores.notes is not None else [""] * count
        given = ["" if np.isnan(value) else f"{value:.2f}" for value in scores.values[:count]]
        verdicts = [f"{note} {value}".strip() for note, value in zip(notes, given, strict=False)]
        if not self.reads_images:
            self.policy_kind.show(folder, batch, verdicts)
            return
        written = [opened.text(row) or "" for row in range(count)]
        prompts = [f"{prompt} → {text}" for prompt, text in zip(batch.prompts, written, strict=False)]
        self.scored_kind.show(folder, replace(batch, prompts=[*prompts, *batch.prompts[count:]]), verdicts)
        write_texts(folder, [Text(*each) for each in zip(batch.prompts, written, verdicts, strict=False)])

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Figures by prompt list."""
        return {record.shard: mean_figures([(record.rows, record.summary)]) for record in records}
