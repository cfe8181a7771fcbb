"""What an epoch of the quickstart costs: as a run, and as its stages alone, without Prefect and MLflow.

python -m tools.benchmarks.epoch
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flowmill.configs.load import load_config
from tests.support.inside import prepare, run_epoch
from tools.benchmarks.learning import ROOT

EPOCHS, _FIRST, _STARTS = 14, 2, 3


class _Taken(NamedTuple):
    cpu: float
    wall: float


def run(root: str, epochs: int, *, seed: int | None = None, more: Sequence[str] = ()) -> _Taken:
    """Run digits for some epochs in processes of its own; return what it took, start-up included.

    Args:
        root: the store.
        epochs: so many.
        seed: of a run that there has not been yet.
        more: further overrides.
    """
    command = [*_command(root, epochs, epochs if seed is None else seed), "--quiet", "--set", "evaluate.every=100"]
    for override in more:
        command += ["--set", override]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return _Taken(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def first(root: str, seed: int) -> float:
    """Return the seconds from the command on until digits, evaluated before, is trained by one epoch."""
    begun = time.monotonic()
    with subprocess.Popen(_command(root, 2, seed), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seconds = [time.monotonic() - begun for line in process.stdout if "epoch 1/" in line]
    return seconds[0]


def _command(root: str, epochs: int, seed: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "flowmill.flows.cli",
        "run",
        "configs/digits.yaml",
        "--root",
        root,
        "--name",
        f"e{seed}",
    ]
    return [*command, "--set", f"run.epochs={epochs}", "--set", f"run.seed={seed}"]


def inside(root: str) -> _Taken:
    """Carry out the stages of some epochs in this process; return what one of the later took."""
    torch.set_num_threads(1)
    settings = [f"store.root={root}", "run.name=inside"]
    context = prepare(load_config(ROOT / "configs" / "digits.yaml", settings))
    spent, begun = 0.0, 0.0
    for epoch in range(1, EPOCHS + 1):
        if epoch == _FIRST + 1:
            spent, begun = 0.0, time.monotonic()
        spent += run_epoch(context, epoch)
    later = EPOCHS - _FIRST
    return _Taken(spent / later, (time.monotonic() - begun) / later)


def table() -> str:
    """Return a table of one epoch; start-up is what a run of two epochs takes beyond them."""
    with tempfile.TemporaryDirectory(prefix="flowmill-epoch-") as root:
        run(root, 0)
        few, many = run(root, _FIRST), run(root, EPOCHS)
        soonest = min(first(root, 100 + number) for number in range(_STARTS))
        command = [sys.executable, "-m", "tools.benchmarks.epoch", "--inside", root]
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        alone = _Taken(*json.loads(output.splitlines()[-1]))
    each = _Taken(*((b - a) / (EPOCHS - _FIRST) for a, b in zip(few, many, strict=True)))
    start = _Taken(*(a - _FIRST * b for a, b in zip(few, each, strict=True)))
    rows = {
        "an epoch of `flowmill run`": each,
        "the same stages alone": alone,
        "start-up and end, evaluations of two epochs": start,
    }
    lines = ["| `digits`, base cached | CPU s | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {took.cpu:.2f} | {took.wall:.2f} |" for name, took in rows.items()]
    return "\n".join([*lines, f"| until the first epoch is trained (least of {_STARTS}) | | {soonest:.2f} |"]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.stdout.write(json.dumps(inside(sys.argv[2])) + "\n")
    else:
        sys.stdout.write(table())
