"""Which gradient of guidance learns better: the conditional half's, or that of both halves.

``python -m tests.benchmarks.guidance``: the digits quickstart with classifier-free guidance, on a base that was trained
with empty prompts too and no longer than leaves something to learn. Same seeds for both; one table and reward curves.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.learning import flowmill

SETTINGS = ("conditional", "both")


def one(root: str, gradient: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Train with one setting and one seed; return curves and CPU seconds."""
    name = f"{gradient}-{seed}"
    mine = ["--set", f"run.seed={seed}", "--set", f"optimize.guidance_gradient={gradient}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    flowmill("run", "configs/digits.yaml", "--root", root, "--name", name, *overrides, *mine)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    status = json.loads(flowmill("status", name, "--root", root, "--json"))
    return {
        "reward": [each["digits"]["mean"] for _, each in sorted(status["rewards"].items(), key=lambda e: int(e[0]))],
        "heldout": {int(epoch): each["heldout"]["digits"]["exact"] for epoch, each in status["evaluations"].items()},
        "judge": {int(epoch): each["heldout"]["judge"]["exact"] for epoch, each in status["evaluations"].items()},
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def row(gradient: str, runs: list[dict[str, Any]]) -> str:
    """Return one line of the table."""
    first, last = min(runs[0]["heldout"]), max(runs[0]["heldout"])
    held = [statistics.mean(run["heldout"][epoch] for run in runs) for epoch in (first, last)]
    judge = statistics.mean(run["judge"][last] for run in runs)
    whole = statistics.mean(statistics.mean(run["reward"]) for run in runs)
    each = ", ".join(f"{run['heldout'][last]:.3f}" for run in runs)
    cpu = statistics.mean(run["cpu"] for run in runs)
    return f"| `{gradient}` | {held[0]:.3f} -> **{held[1]:.3f}** ({each}) | {judge:.3f} | {whole:.3f} | {cpu:.0f} |\n"


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=240, help="flow-matching steps of the base")
    parser.add_argument("--set", action="append", default=[], help="further settings of the runs")
    parser.add_argument("--write", type=Path, help="also write all curves to this JSON file")
    options = parser.parse_args()
    build = f"model.build.options={{steps: {options.steps}, prompt_dropout: 0.1}}"
    settings = [build, f"model.guidance_scale={options.guidance}", f"run.epochs={options.epochs}", *options.set]
    overrides = [part for setting in settings for part in ("--set", setting)]
    sys.stdout.write(
        f"| `guidance_gradient` | held-out exact match, {options.seeds} seeds | judge | mean reward over all epochs "
        "| CPU s per run |\n|---|---|---|---|---|\n"
    )
    curves: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="flowmill-guidance-") as root:
        flowmill("run", "configs/digits.yaml", "--root", root, "--name", "base", *overrides, "--set", "run.epochs=0")
        for gradient in SETTINGS:
            curves[gradient] = [one(root, gradient, seed, overrides) for seed in range(options.seeds)]
            sys.stdout.write(row(gradient, curves[gradient]))
            sys.stdout.flush()
    for gradient, runs in curves.items():
        epochs = [statistics.mean(values) for values in zip(*(run["reward"] for run in runs), strict=True)]
        sys.stdout.write(f"reward by epoch, {gradient}: {' '.join(f'{value:.3f}' for value in epochs)}\n")
    if options.write:
        options.write.write_text(json.dumps(curves, indent=1))


if __name__ == "__main__":
    main()
