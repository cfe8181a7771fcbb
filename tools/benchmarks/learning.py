"""How well every algorithm learns the quickstart: held-out exact match and CPU seconds, several seeds, one table.

Every run is carried out in this process, without orchestration and tracking; all share one base model, built first.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from flowmill.configs.load import load_config
from flowmill.tasks.execution.session import Session
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage_run import StageRun

ROOT = Path(__file__).parent.parent.parent
#: Student's 97.5 % quantile by number of seeds.
_STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
#: Presets of the quickstart that need samples or judgments of people, which ``tools`` makes.
_WITH_DATA = ("digits_given_dpo", "digits_sft", "digits_taste")


def flowmill(*arguments: str) -> str:
    """Run the command line and return what it prints."""
    environment = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", "flowmill.flows.cli", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    return result.stdout


def trained(preset: str, root: str, *overrides: str, evaluated: bool = True) -> RunContext:
    """Carry out the epochs of a run in this process; optionally evaluate before the first and after the last."""
    context = begin_run(load_config(preset, [f"store.root={root}", "evaluate.every=1000", *overrides]))
    session, plan, last = Session(context), context.plan, context.config.run.epochs
    nodes: list[Node] = [*plan.setup(), *(plan.evaluation(0) if evaluated else ())]
    for epoch in range(1, last + 1):
        nodes += [*plan.scored(epoch), *plan.training(epoch)]
    for node in [*nodes, *(plan.evaluation(last) if evaluated else ())]:
        StageRun(session.stage(node)).execute()
    return context


def presets() -> list[str]:
    """Return the quickstart's presets, plain Flow-GRPO first."""
    names = sorted(path.stem for path in (ROOT / "configs").glob("digits*.yaml"))
    return [name for name in names if name not in _WITH_DATA]


def one(root: str, preset: str, seed: int) -> dict[str, float]:
    """Train one preset with one seed."""
    started = time.process_time()
    context = trained(preset, root, f"run.seed={seed}", f"run.name={preset}-{seed}")
    cpu, last = time.process_time() - started, context.config.run.epochs
    before, after = (evaluation_figures(context.chain, epoch)["heldout"] for epoch in (0, last))
    return {
        "before": before["digits"]["exact"],
        "after": after["digits"]["exact"],
        "judge": after["judge"]["exact"],
        "epochs": last,
        "cpu": cpu,
    }


def interval(values: list[float]) -> str:
    """Return the 95 % interval of the mean of shares over seeds, within 0 and 1; empty for one seed."""
    if len(values) < 2:
        return ""
    mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
    low, high = mean - _STUDENT[len(values)] * error, mean + _STUDENT[len(values)] * error
    return f"{max(0.0, low):.3f} to {min(1.0, high):.3f}"


def table(root: str, seeds: int, chosen: list[str]) -> str:
    """Train every preset with every seed and return a Markdown table."""
    trained("digits", root, "run.epochs=0", "run.name=base", evaluated=False)
    lines = [
        f"| preset | held-out exact match, {seeds} seeds | 95 % interval | judge | epochs | CPU s per run |",
        "|---|---|---|---|---|---|",
    ]
    for preset in chosen:
        lines.append(row(preset, [one(root, preset, seed) for seed in range(seeds)]))
        sys.stderr.write(lines[-1] + "\n")
    return "\n".join(lines) + "\n"


def row(preset: str, runs: list[dict[str, float]]) -> str:
    """Return the line of a preset, from its runs of all seeds."""
    mean = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
    after = [run["after"] for run in runs]
    cells = [
        f"`{preset}`",
        f"{mean['before']:.3f} -> **{mean['after']:.3f}** ({', '.join(f'{each:.3f}' for each in after)})",
        interval(after),
        f"{mean['judge']:.3f}",
        f"{mean['epochs']:.0f}",
        f"{mean['cpu']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"
