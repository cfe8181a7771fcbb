"""How well every algorithm learns the quickstart: held-out exact match and CPU seconds, several seeds, one table.

The base model is built first and shared, so that CPU seconds are those of training and evaluation alone.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def flowmill(*arguments: str) -> str:
    """Run the command line and return what it prints."""
    environment = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", "flows.cli", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    return result.stdout


def presets() -> list[str]:
    """Return the quickstart's presets, plain Flow-GRPO first; ``tools.taste`` makes the reward of another."""
    return sorted(path.stem for path in (ROOT / "configs").glob("digits*.yaml") if path.stem != "digits_taste")


def one(root: str, preset: str, seed: int) -> dict[str, float]:
    """Train one preset with one seed."""
    name = f"{preset}-{seed}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = flowmill("run", f"configs/{preset}.yaml", "--root", root, "--name", name, "--set", f"run.seed={seed}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    status = json.loads(flowmill("status", name, "--root", root, "--json"))
    first, last = (status["evaluations"][key] for key in ("0", max(status["evaluations"], key=int)))
    cost = next(line for line in output.splitlines() if "orchestration" in line)
    return {
        "before": first["heldout"]["digits"]["exact"],
        "after": last["heldout"]["digits"]["exact"],
        "judge": last["heldout"]["judge"]["exact"],
        "epochs": status["finished_epochs"],
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "overhead": float(cost.split("(")[1].split(" %")[0]),
    }


def table(root: str, seeds: int, chosen: list[str]) -> str:
    """Train every preset with every seed and return a Markdown table."""
    flowmill("run", "configs/digits.yaml", "--root", root, "--name", "base", "--set", "run.epochs=0")
    lines = [
        f"| preset | held-out exact match, {seeds} seeds | judge | epochs | CPU s per run | overhead |",
        "|---|---|---|---|---|---|",
    ]
    for preset in chosen:
        runs = [one(root, preset, seed) for seed in range(seeds)]
        mean = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        each = ", ".join(f"{run['after']:.3f}" for run in runs)
        lines.append(
            f"| `{preset}` | {mean['before']:.3f} -> **{mean['after']:.3f}** ({each}) | {mean['judge']:.3f} "
            f"| {mean['epochs']:.0f} | {mean['cpu']:.0f} | {mean['overhead']:.0f} % |"
        )
        sys.stderr.write(lines[-1] + "\n")
    return "\n".join(lines) + "\n"
