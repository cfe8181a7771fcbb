"""The samples that the explorer shows: those of a rollout or an evaluation, as tables, and pairs of two of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import flowmill
from flowmill.configs.escaping import in_cell

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image

#: Columns that identify the noise of a sample: the same prompt and replica, drawn from the same seed.
NOISE = ["prompt_id", "replica", "seed"]
_EVALUATION, _ROLLOUT, _GIVEN = "evaluation of epoch ", "rollout of epoch ", "given samples of epoch "


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one rollout or evaluation of a run."""

    run: flowmill.Run
    """The run."""
    label: str
    """One of ``labels`` of the run."""

    @property
    def epoch(self) -> int:
        """The epoch."""
        return int(self.label.rpartition(" ")[2])

    @property
    def evaluated(self) -> bool:
        """Whether they are of an evaluation."""
        return self.label.startswith(_EVALUATION)

    @property
    def title(self) -> str:
        """Run and label."""
        return f"{self.run.name}, {self.label}"

    def table(self) -> pd.DataFrame:
        """Return a row per sample, as ``Run.samples`` or ``Run.evaluation``."""
        read = self.run.evaluation if self.evaluated else self.run.samples
        return read(self.epoch).to_pandas().astype({"prompt": str})

    def media(self, rows: pd.DataFrame, *, sound: bool = False) -> dict[str, Image | list[Image] | bytes | str]:
        """Return the image, the frames of the clip, or the text of each row by sample id.

        Args:
            rows: rows of the table.
            sound: return clips with sound as mp4 files.
        """
        drawn = rows[rows.media_format != ""]
        texts = {} if "text" not in rows else dict(zip(rows.sample_id, rows.text, strict=True))
        images = self.run.images(self.epoch, set(drawn.sample_id), evaluation=self.evaluated)
        films = set(drawn.sample_id[drawn.media_format == "mp4"]) if sound else set()
        clips = self.run.films(self.epoch, films, evaluation=self.evaluated) if films else {}
        return texts | images | clips


def labels(run: flowmill.Run) -> list[str]:
    """Return the labels of a run's rollouts, or ingested samples, and evaluations, newest first."""
    by_epoch = [(epoch, f"{_ROLLOUT if run.config.data is None else _GIVEN}{epoch}") for epoch in run.rollouts]
    by_epoch += [(epoch, f"{_EVALUATION}{epoch}") for epoch in run.evaluations]
    return [label for _, label in sorted(by_epoch, reverse=True)]


def first_shown(names: Sequence[str]) -> str:
    """Return the label among ``names``, newest first, that the page opens on: the last evaluation, if there is one."""
    return next((each for each in names if each.startswith(_EVALUATION)), names[0])


def comparable(names: Iterable[str], label: str) -> list[str]:
    """Return the labels among ``names`` that can have the noise of ``label``, the default first.

    Evaluations of all epochs draw the same noise; a rollout has that of the same epoch of another run.
    """
    if label.startswith(_EVALUATION):
        return [each for each in reversed(list(names)) if each.startswith(_EVALUATION)]
    return [each for each in names if each == label]


def paired(samples: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Return the samples whose noise ``other`` has too.

    Additional columns: 'other', the sample id there, and 'change.<figure>', this figure minus that one.
    """
    shared = [name for name in figures(samples) if name in other]
    renamed = {"sample_id": "other"} | {name: f"change.{name}" for name in shared}
    others = other[[*NOISE, *renamed]].drop_duplicates(NOISE).rename(columns=renamed)
    pairs = samples.merge(others, on=NOISE)
    return pairs.assign(**{f"change.{name}": pairs[name] - pairs[f"change.{name}"] for name in shared})


def figures(samples: pd.DataFrame) -> list[str]:
    """Return the columns of figures: changes, the optimized sum, its advantage, then single rewards.

    A reward that equals the optimized sum is left out.
    """
    singles = [name for name in samples if name.startswith("reward.") and not _equal(samples, name, "reward")]
    changes = [name for name in samples if name.startswith("change.")]
    return [*changes, *(name for name in ("reward", "advantage") if name in samples), *singles]


def _equal(samples: pd.DataFrame, name: str, other: str) -> bool:
    return other in samples and np.array_equal(samples[name], samples[other], equal_nan=True)


def stops(values: pd.Series[Any]) -> list[float]:
    """Return the values at which a slider stops: the smallest, the largest, and at most 99 between them.

    Values that look equal with four digits are one stop. An empty or constant column has fewer than two.
    """
    levels = np.unique(values.dropna())
    chosen = levels[np.unique(np.linspace(0, len(levels) - 1, 101).round().astype(int))] if len(levels) else levels
    shown = {short(each): float(each) for each in reversed(chosen)}
    return sorted({**shown, short(chosen[-1]): float(chosen[-1])}.values()) if shown else []


def short(value: float, digits: int = 4) -> str:
    """Return a figure with so many significant digits."""
    return f"{value:.{digits}g}"


def in_groups(samples: pd.DataFrame, order: str, *, largest_first: bool) -> pd.DataFrame:
    """Return samples with those of a group together, in the order of a column.

    Groups are in the order of the mean of a figure, or of the first of their texts.
    """
    of_group = samples.groupby("group_id")[order].transform("mean" if order in figures(samples) else "min")
    keyed = samples.assign(of_group=of_group)
    ascending = [not largest_first, True, not largest_first, True]
    ordered = keyed.sort_values(["of_group", "group_id", order, "sample_id"], ascending=ascending)
    return ordered.drop(columns="of_group")


def in_cells(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table without formulas: a shown table can be saved as CSV."""
    return table.assign(**{name: table[name].map(in_cell) for name in table.select_dtypes(exclude="number")})


def in_reading_order(columns: Sequence[str]) -> list[str]:
    """Return columns in reading order: rewards, prompt and text, then all others."""
    first = [name for name in ("reward", "advantage", "prompt", "text") if name in columns]
    rewards = [name for name in columns if name.startswith(("change.", "reward."))]
    return list(dict.fromkeys([*first, *rewards, *columns]))
