"""Which gradient of guidance learns better: the conditional half's, or that of both halves.

``python -m tools.benchmarks.guidance``: the digits quickstart with classifier-free guidance, on a base that was trained
with empty prompts too and no longer than leaves something to learn. Same seeds for both settings; one table and the
mean reward of every epoch. Stages run in this process, so that CPU seconds are theirs alone; ``--root`` resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flowmill.configs.load import load_config
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.stages.stage_run import StageRun
from tests.support.inside import evaluate, make_stage, prepare

ROOT = Path(__file__).parent.parent.parent
SETTINGS = ("conditional", "both")


def execute(context: RunContext, name: str, epoch: int, slot: str = "") -> float:
    """Run a stage; return its CPU seconds, next to 0 where it was done before."""
    before = time.process_time()
    StageRun(make_stage(context, name, epoch, slot)).execute()
    return time.process_time() - before


def one(root: str, gradient: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Train with one setting and one seed; return curves and CPU seconds of the optimize stages."""
    mine = [f"store.root={root}", f"run.name={gradient}-{seed}", f"run.seed={seed}"]
    config = load_config(ROOT / "configs" / "digits.yaml", [*settings, *mine, f"optimize.guidance_gradient={gradient}"])
    context, cpu = prepare(config), 0.0
    evaluate(context, 0)
    for epoch in range(1, config.run.epochs + 1):
        execute(context, "rollout", epoch)
        execute(context, "score", epoch, "digits")
        execute(context, "advantage", epoch)
        cpu += execute(context, "optimize", epoch)
    evaluate(context, config.run.epochs)
    told = describe_run(context)
    rewards = sorted(told["rewards"].items(), key=lambda entry: int(entry[0]))
    heldout = [told["evaluations"][str(epoch)]["heldout"] for epoch in (0, config.run.epochs)]
    return {
        "reward": [each["digits"]["mean"] for _, each in rewards],
        "before": heldout[0]["digits"]["exact"],
        "after": heldout[1]["digits"]["exact"],
        "judge": heldout[1]["judge"]["exact"],
        "cpu": cpu,
    }


def row(gradient: str, runs: list[dict[str, Any]]) -> str:
    """Return one line of the table."""
    mean = {key: statistics.mean(run[key] for run in runs) for key in ("before", "after", "judge", "cpu")}
    last = statistics.mean(statistics.mean(run["reward"][-5:]) for run in runs)
    each = ", ".join(f"{run['after']:.3f}" for run in runs)
    return (
        f"| `{gradient}` | {mean['before']:.3f} -> **{mean['after']:.3f}** ({each}) | {mean['judge']:.3f} "
        f"| {last:.3f} | {mean['cpu']:.0f} |\n"
    )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--gradients", nargs="*", default=SETTINGS, choices=SETTINGS)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=240, help="flow-matching steps of the base")
    parser.add_argument("--set", action="append", default=[], help="further settings of the runs")
    parser.add_argument("--root", help="store to keep and to resume from; a temporary one when absent")
    parser.add_argument("--write", type=Path, help="also write all curves to this JSON file")
    options = parser.parse_args()
    build = f"model.build.options={{steps: {options.steps}, prompt_dropout: 0.1}}"
    settings = [build, f"model.guidance_scale={options.guidance}", f"run.epochs={options.epochs}", *options.set]
    sys.stdout.write(
        "| `guidance_gradient` | held-out exact match, each seed | judge | train reward, last 5 epochs "
        "| CPU s of training |\n|---|---|---|---|---|\n"
    )
    curves: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="flowmill-guidance-") as temporary:
        for gradient in options.gradients:
            root = options.root or temporary
            curves[gradient] = [one(root, gradient, seed, settings) for seed in options.seeds]
            sys.stdout.write(row(gradient, curves[gradient]))
            sys.stdout.flush()
    for gradient, runs in curves.items():
        epochs = [statistics.mean(values) for values in zip(*(run["reward"] for run in runs), strict=True)]
        sys.stdout.write(f"reward by epoch, {gradient}: {' '.join(f'{value:.3f}' for value in epochs)}\n")
    if options.write:
        options.write.write_text(json.dumps(curves, indent=1))


if __name__ == "__main__":
    main()
