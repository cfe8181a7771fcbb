"""Metrics of an update, aggregated from row figures that stay on the device until the update ends.

Reading a number after each micro-batch would stall the accelerator each time.

Legend: B rows of a micro-batch, R rows of this rank in an update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowmill.models.devices import widened
from flowmill.tasks.algorithms.base import LARGEST, Batch

#: Prefix of the gradient norm of one of several trained modules.
MODULE_NORM = "grad_norm_"
_CLIP_AGE = "clip_age"
#: Lower bound of weights before the logarithm; smaller weights underflowed.
_SMALLEST = torch.finfo(torch.float64).tiny


@dataclass(slots=True)
class RowFigures:
    """The rows of one update that this rank works on."""

    rows: int
    """Rows of the update, on all ranks."""
    first: bool = False
    """It is the first update of its epoch: fresh rows should give the log-probs of the rollout."""
    _figures: list[Tensor] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _ages: list[Tensor] = field(default_factory=list)
    _steps: list[Tensor] = field(default_factory=list)
    _importance: list[Tensor] = field(default_factory=list)

    def add(self, batch: Batch, figures: Mapping[str, Tensor]) -> None:
        """Add the (B,) figures of a micro-batch, without reading from the device."""
        self._names = list(figures)
        self._figures.append(torch.stack([widened(values.detach()) for values in figures.values()])[:, : batch.count])
        self._ages.append(batch.age[: batch.count])
        self._steps.append(batch.step[: batch.count])
        if batch.weighed:
            self._importance.append(batch.importance[: batch.count])

    def totals(self) -> dict[str, float]:
        """Return this rank's part of the means over all rows, and the share of rows of each partial mean."""
        if not sum(len(ages) for ages in self._ages):
            return {}
        table = torch.cat(self._figures, dim=1).cpu().double()
        figures = dict(zip(self._names, table, strict=True))
        gap = figures.pop("gap", None)
        largest = {name: float(values.max()) for name, values in figures.items() if name.startswith(LARGEST)}
        totals = {name: float(values.sum()) / self.rows for name, values in figures.items()} | largest
        ages, steps = torch.cat(self._ages), torch.cat(self._steps)
        parts = self._labeled(figures, ages, steps)
        fresh = ages == 0
        # Rollouts ahead of training have no fresh rows.
        if gap is not None and self.first and bool(fresh.any()):
            parts |= _gaps(gap, fresh, steps)
            totals[f"{LARGEST}replay_gap_max"] = float(gap[fresh].max())
        for name, (values, mask) in parts.items():
            totals[name] = float(values[mask].sum()) / self.rows
            totals[f"share_{name}"] = float(mask.sum()) / self.rows
        return totals

    def _labeled(self, figures: Mapping[str, Tensor], ages: Tensor, steps: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (values, mask) of ratios by denoising step; with replay, of clip shares by age and stale weights."""
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        if "ratio" in figures:
            parts |= {f"ratio_step{i}": (figures["ratio"], steps == i) for i in steps.unique().tolist()}
        # Algorithms of one's own may clip nothing.
        if {"clip_high", "clip_low"} <= figures.keys():
            clipped = figures["clip_high"] + figures["clip_low"]
            parts |= {f"{_CLIP_AGE}{age}": (clipped, ages == age) for age in ages.unique().tolist()}
        if int(ages.max()) > 0 and self._importance:
            weight = torch.cat(self._importance).cpu().double()
            weights = {
                "importance": weight,
                "importance_squared": weight**2,
                "behavior_kl": -torch.log(weight.clamp(min=_SMALLEST)),
            }
            parts |= {name: (values, ages > 0) for name, values in weights.items()}
        return parts


def _gaps(gap: Tensor, fresh: Tensor, steps: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (values, mask) of the gap between log-probs of fresh rows now and in the rollout, in all and by step."""
    by_step = {f"replay_gap_step{i}": (gap, fresh & (steps == i)) for i in steps[fresh].unique().tolist()}
    return {"replay_gap": (gap, fresh), **by_step}


def entry(update: int, rows: int, gradient_norm: float, means: Mapping[str, float]) -> dict[str, float]:
    """Return the reported figures of an update, from totals summed over ranks."""
    figures = {"update": update, "rows": rows, "grad_norm": gradient_norm, **means}
    # Whether there are stale rows is known of all ranks only.
    if not any(name.startswith(_CLIP_AGE) for name in figures.keys() - {f"{_CLIP_AGE}0"}):
        figures = {name: value for name, value in figures.items() if not name.endswith(f"{_CLIP_AGE}0")}
    for name in [name for name in figures if name.startswith("share_")]:
        share = figures.pop(name)
        figures[name.removeprefix("share_")] /= share
    for name in [name for name in figures if name.startswith(LARGEST)]:
        figures[name.removeprefix(LARGEST)] = figures.pop(name)
    if "importance_squared" in figures:
        # Effective sample size as a share of the stale rows: (sum w)^2 / (n sum w^2).
        squared = figures.pop("importance_squared")
        figures["effective_samples"] = figures["importance"] ** 2 / squared if squared else 0.0
    if "ratio_change_squared" in figures:
        # Squares of ratios themselves would round a std below 1e-8 away.
        squared = figures.pop("ratio_change_squared")
        figures["ratio_std"] = math.sqrt(max(0.0, squared - (figures["ratio"] - 1) ** 2))
        figures["ratio_mean"] = figures.pop("ratio")
    return figures


def idle_modules(metrics: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """Return the names of trained modules to which no update of an epoch gave a gradient.

    Args:
        metrics: of each update; they have a gradient norm per module if several are trained.
    """
    names = [name.removeprefix(MODULE_NORM) for name in (metrics or [{}])[0] if name.startswith(MODULE_NORM)]
    return tuple(name for name in names if not any(each[f"{MODULE_NORM}{name}"] for each in metrics))


def idle_note(names: Sequence[str]) -> str:
    """Return the warning on modules without gradients."""
    return (
        f"{' and '.join(names)} of the model got no gradient and stayed as before, as no trained step or noise level "
        "was in its range. To train it too, train steps or levels of that range (rollout.plan or "
        "optimize.algorithm.options.times), or more rows per epoch."
    )
