"""How soon every algorithm reaches a level on the quickstart: epochs and CPU seconds of training, several seeds.

python -m tools.benchmarks.crossing --presets digits digits_crd --seeds 5

Stages run here one after the other, without Prefect and MLflow; evaluations are not counted. The exact match of an
epoch is that of 504 images of held-out prompts; ``--split train`` looks at trained ones, to choose settings by.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from flowmill.configs.load import load_config
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.specs.graph import OF
from tests.support.inside import evaluate, prepare, run_epoch
from tools.benchmarks.learning import ROOT, presets

Curve = list[tuple[float, float]]
#: Presets that optimize another reward are judged by the classifier of the others.
_JUDGE = "classifier"
#: Images of a first look: the full evaluation follows where their exact match is within the margin of the level or
#: above, four standard deviations at 0.85.
_SCREEN, _MARGIN = 144, 0.1


def curve(root: str, preset: str, seed: int, options: argparse.Namespace) -> Curve:
    """Return CPU seconds and exact match after every epoch of a run; without a plot only until it reaches the level."""
    name, samples = f"{preset}-{seed}", f"evaluate.samples={options.samples}"
    screened = options.plot is None and options.samples > _SCREEN
    settings = [f"store.root={root}", f"run.seed={seed}", f"run.name={name}", f"evaluate.seed={1000 + seed}"]
    settings += [
        f"evaluate.samples={_SCREEN}" if screened else samples,
        f"evaluate.judges=[{{name: digits, label: {_JUDGE}}}]",
        *options.set,
    ]
    context = prepare(load_config(ROOT / "configs" / f"{preset}.yaml", settings))

    def exact(epoch: int) -> float:
        share = _exact(context, epoch, options.split)
        if not screened or share < options.level - _MARGIN:
            return share
        return _exact(
            open_run(root, name, overrides=[samples], epoch=epoch, trusted=True), epoch, options.split, "full"
        )

    found: Curve = [(0.0, exact(0))]
    for epoch in range(1, context.config.run.epochs + 1):
        found.append((found[-1][0] + run_epoch(context, epoch), exact(epoch)))
        if options.plot is None and found[-1][1] >= options.level:
            break
    return found


def _exact(context: RunContext, epoch: int, split: str, name: str = "") -> float:
    evaluate(context, epoch, name)
    judged = context.chain.require(epoch, "judge", f"{_JUDGE}{OF}{name}" if name else _JUDGE).ref
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
    """Return a table of all presets, the fastest first; draw them where asked to."""
    torch.set_num_threads(1)
    head = f"| preset | epochs until {options.split} exact match is {options.level:g}, by seed "
    lines = [f"{head}| CPU s until then: median (least to most) |", "|---|---|---|"]
    curves: dict[str, list[Curve]] = {}
    rows: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory(prefix="flowmill-crossing-") as folder:
        for preset in options.presets:
            curves[preset] = [curve(folder, preset, seed, options) for seed in range(options.seeds)]
            crossings = [crossing(each, options.level) for each in curves[preset]]
            epochs = ", ".join("-" if one is None else str(one[0]) for one in crossings)
            cpu = sorted(math.inf if one is None else one[1] for one in crossings)
            median, least, most = (
                "-" if math.isinf(each) else f"{each:.1f}" for each in (_median(cpu), cpu[0], cpu[-1])
            )
            rows.append((_median(cpu), f"| `{preset}` | {epochs} | {median} ({least} to {most}) |"))
            sys.stderr.write(f"{rows[-1][1]}\n")
    if options.plot is not None:
        plot(curves, options.plot)
    return "\n".join([*lines, *(line for _, line in sorted(rows))]) + "\n"


def _median(values: Sequence[float]) -> float:
    """Return the middle of sorted values, the upper of two: runs that never reach the level are infinite."""
    return values[len(values) // 2]


if __name__ == "__main__":
    sys.stdout.write(table(options_of()))
