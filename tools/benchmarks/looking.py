"""How soon status, diff and report of two long runs answer: wall seconds and CPU seconds of the whole command.

python -m tools.benchmarks.looking
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs.load import load_config
from models.quickstart.build import DigitsBuilder
from tests.support.inside import evaluate, prepare, run_epoch
from tests.support.small import small_data, write_small
from tools.benchmarks.learning import ROOT

EPOCHS = 300
COMMANDS = ("status one", "diff one two", "report one --out report.html")
_ROUNDS = 5


def train(folder: Path, name: str, epochs: int) -> None:
    """Train a tiny model for so many epochs, evaluated every 50."""
    data = small_data(folder, folder / "base")
    data["run"], data["evaluate"]["every"] = {"name": name, "epochs": epochs}, 50
    context = prepare(load_config(write_small(folder, data)))
    evaluate(context, 0)
    for epoch in range(1, epochs + 1):
        run_epoch(context, epoch)
        if epoch % 50 == 0:
            evaluate(context, epoch)


def table(epochs: int = EPOCHS) -> str:
    """Return a table: the least of five of each command, on runs of so many epochs."""
    lines = [f"| on {epochs} epochs | wall s | CPU s |", "|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="flowmill-looking-") as place:
        folder = Path(place)
        DigitsBuilder(steps=20, vae_steps=20, images=500).build(folder / "base", lambda label, done, total: None)
        train(folder, "one", epochs)
        # It finds what the first made: as much to read, for no training.
        train(folder, "two", epochs)
        for command in COMMANDS:
            taken = [_timed([*command.split(), "--root", "store"], folder) for _ in range(_ROUNDS)]
            wall, cpu = (min(each) for each in zip(*taken, strict=True))
            lines.append(f"| `flowmill {command}` | {wall:.2f} | {cpu:.2f} |")
    return "\n".join(lines) + "\n"


def _timed(arguments: list[str], folder: Path) -> tuple[float, float]:
    """Return the wall and CPU seconds of a command."""
    before, begun = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "flows.cli", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begun, used


if __name__ == "__main__":
    sys.stdout.write(table())
