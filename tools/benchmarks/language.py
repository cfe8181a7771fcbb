"""Presets of sums compared with TRL: the same base model, prompts, reward, batches and updates, in CPU seconds.

``python -m tools.benchmarks.language [PRESET] [--seeds N] [--epochs N]`` prints one table; without TRL it has one side.
TRL is no dependency; 1.12 is its last version with a PPOTrainer. Start-up and evaluations are left out of both sides.
Stages, commits, tracking and the servers that a run starts are included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from flowmill.configs.load import load_config
from tools.benchmarks.learning import ROOT, flowmill

RISE = 0.3
"""Rise of the greedy exact match of held-out prompts to measure up to."""


class Side(NamedTuple):
    """The result of a trainer with one seed."""

    first: int | None
    """Epochs after which the match has risen by ``RISE``; None: it never has."""
    spent: float | None
    """CPU seconds up to then."""
    cpu: float
    """CPU seconds of all epochs."""
    after: float
    """The match after them."""

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        crossed = ["never", "-"] if self.first is None else [str(self.first), f"{self.spent:.0f}"]
        return [*crossed, f"{self.cpu:.0f}", f"{self.after:.2f}"]


def side(curve: list[tuple[int, float, float]]) -> Side:
    """Return the result of (epochs, CPU seconds, match), the base model first."""
    crossed = ((epoch, cpu) for epoch, cpu, match in curve if match >= curve[0][2] + RISE)
    first, spent = next(crossed, (None, None))
    _, total, after = curve[-1]
    return Side(first, spent, total, after)


def run(preset: str, root: str, name: str, settings: list[str]) -> float:
    """Return the CPU seconds of a run, with those of every process it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    sets = [part for each in settings for part in ("--set", each)]
    flowmill("run", f"configs/{preset}.yaml", "--root", root, "--name", name, *sets)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ours(preset: str, root: str, seed: int, epochs: int, every: int) -> Side:
    """Train with flowmill; the cost of an epoch is the additional cost of more epochs than one, by their number."""
    settings = [f"run.seed={seed}", f"evaluate.every={epochs}"]
    first = run(preset, root, f"one-{seed}", [*settings, "run.epochs=1"])
    cost = (run(preset, root, f"all-{seed}", [*settings, f"run.epochs={epochs}"]) - first) / (epochs - 1)
    curve = f"curve-{seed}"
    run(preset, root, curve, [f"run.seed={seed}", f"evaluate.every={every}", f"run.epochs={epochs}"])
    found = json.loads(flowmill("status", curve, "--root", root, "--json"))["evaluations"]
    matches = sorted((int(epoch), each["heldout"]["exact_text"]["exact"]) for epoch, each in found.items())
    return side([(epoch, epoch * cost, match) for epoch, match in matches])


def peer(preset: str, base: Path, seed: int, epochs: int, every: int) -> Side:
    """Train with TRL, in a separate process."""
    command = [sys.executable, "-m", "tools.benchmarks.trl_peers", f"configs/{preset}.yaml", str(base)]
    command += ["--seed", str(seed), "--epochs", str(epochs), "--every", str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return side([tuple(each) for each in json.loads(done.stdout.splitlines()[-1])])


def table(preset: str, root: str, seeds: int, epochs: int, every: int) -> str:
    """Return both sides with every seed as Markdown."""
    has_peer = importlib.util.find_spec("trl") is not None
    columns = [f"to +{RISE:g}", "CPU s", f"{epochs} epochs, CPU s", "after"]
    heads = [*columns, *[f"TRL {each}" for each in columns], f"CPU to +{RISE:g}, flowmill / TRL", "of all epochs"]
    lines = ["| seed | " + " | ".join(heads if has_peer else columns) + " |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    # Makes the base model, which otherwise the first measured run would make.
    flowmill("run", f"configs/{preset}.yaml", "--root", root, "--name", "base", "--set", "run.epochs=0")
    for seed in range(seeds):
        own = ours(preset, root, seed, epochs, every)
        cells = own.cells()
        if has_peer:
            (folder,) = Path(root).glob("bases/*/*/pipeline")
            theirs = peer(preset, folder, seed, epochs, every)
            ratio = f"{own.spent / theirs.spent:.2f}" if own.spent and theirs.spent else "-"
            cells += [*theirs.cells(), ratio, f"{own.cpu / theirs.cpu:.2f}"]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
        sys.stderr.write(lines[-1] + "\n")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", nargs="?", default="addition_grpo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--every", type=int, default=4, help="epochs between evaluations")
    options = parser.parse_args()
    epochs = options.epochs or load_config(ROOT / f"configs/{options.preset}.yaml").run.epochs
    with tempfile.TemporaryDirectory() as root:
        sys.stdout.write(table(options.preset, root, options.seeds, epochs, options.every))


if __name__ == "__main__":
    main()
