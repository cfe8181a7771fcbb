"""How soon every algorithm reaches a level on the quickstart: epochs and CPU seconds of training, several seeds.

python -m tools.benchmarks.crossing --presets digits digits_crd --seeds 5

Stages run here one after the other, without Prefect and MLflow; evaluations are not counted. The exact match of an
epoch is that of 504 images of held-out prompts; ``--split train`` looks at trained ones, to choose settings by.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from flowmill.configs.load import load_config
from flowmill.tasks.runs.context import RunContext
from tests.support.inside import evaluate, prepare, run_epoch
from tools.benchmarks.learning import ROOT, presets

Curve = list[tuple[float, float]]


def curve(root: str, preset: str, seed: int, options: argparse.Namespace) -> Curve:
    """Return CPU seconds and exact match after every epoch of a run; without a plot only until it reaches the level."""
    settings = [f"store.root={root}", f"run.seed={seed}", f"run.name={preset}-{seed}", f"evaluate.seed={1000 + seed}"]
    settings += [f"evaluate.samples={options.samples}", "evaluate.judges=[]", *options.set]
    context = prepare(load_config(ROOT / "configs" / f"{preset}.yaml", settings))
    found: Curve = [(0.0, _exact(context, 0, options.split))]
    for epoch in range(1, context.config.run.epochs + 1):
        spent = found[-1][0] + run_epoch(context, epoch)
        found.append((spent, _exact(context, epoch, options.split)))
        if options.plot is None and found[-1][1] >= options.level:
            break
    return found


def _exact(context: RunContext, epoch: int, split: str) -> float:
    evaluate(context, epoch)
    judged = context.chain.require(epoch, "judge", context.config.rewards[0].slot).ref
    return float(context.store.require(judged).summary[split]["exact"])


def crossing(found: Curve, level: float) -> tuple[int, float] | None:
    """Return after how many epochs and CPU seconds a curve reaches a level, None if it does not."""
    return next(((epoch, cpu) for epoch, (cpu, share) in enumerate(found) if share >= level), None)


def plot(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw the mean of each preset's curves, and what lies between their lowest and highest."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for preset, seeds in curves.items():
        values = np.array(seeds)
        cpu, shares = values[:, :, 0].mean(0), values[:, :, 1]
        (line,) = axes.plot(cpu, shares.mean(0), label=preset)
        axes.fill_between(cpu, shares.min(0), shares.max(0), alpha=0.2, color=line.get_color(), linewidth=0)
    axes.set(xlabel="CPU seconds of training", ylabel="held-out exact match", ylim=(None, 1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what a command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="*", default=presets())
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--split", choices=("heldout", "train"), default="heldout")
    parser.add_argument("--samples", type=int, default=504)
    parser.add_argument("--level", type=float, default=0.85)
    parser.add_argument("--set", nargs="*", default=[], help="settings on top of every preset")
    parser.add_argument("--plot", type=Path, help="draw the whole runs into this file")
    return parser.parse_args(arguments)


def table(options: argparse.Namespace) -> str:
    """Return a table of all presets; draw them where asked to."""
    torch.set_num_threads(1)
    head = f"| preset | epochs until {options.split} exact match is {options.level:g} | CPU s until then |"
    lines = [head, "|---|---|---|"]
    curves: dict[str, list[Curve]] = {}
    with tempfile.TemporaryDirectory(prefix="flowmill-crossing-") as folder:
        for preset in options.presets:
            seeds = range(options.seeds)
            curves[preset] = [curve(folder, preset, seed, options) for seed in seeds]
            found = [crossing(each, options.level) for each in curves[preset]]
            reached = [each for each in found if each is not None]
            each = ", ".join("-" if one is None else str(one[0]) for one in found)
            mean = f"{statistics.mean(cpu for _, cpu in reached):.1f}" if reached else "-"
            missed = f" ({len(found) - len(reached)} of {len(found)} never)" if len(reached) < len(found) else ""
            lines.append(f"| `{preset}` | {each}{missed} | {mean} |")
    if options.plot is not None:
        plot(curves, options.plot)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(options_of()))
