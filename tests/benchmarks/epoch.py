"""What an epoch of the quickstart costs: as a run, and as its stages alone, without Prefect and MLflow.

python -m tests.benchmarks.epoch
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import torch

from configs.load import load_config
from tests.benchmarks.learning import ROOT
from tests.inside import prepare, run_epoch

EPOCHS, _FIRST = 14, 2


class _Taken(NamedTuple):
    cpu: float
    wall: float


def run(root: str, epochs: int) -> _Taken:
    """Run digits for some epochs in processes of its own; return what it took, start-up included."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "flows.cli", "run", "configs/digits.yaml", "--root", root, "--name", f"e{epochs}"]
    settings = [
        "--quiet",
        "--set",
        f"run.epochs={epochs}",
        "--set",
        "evaluate.every=100",
        "--set",
        f"run.seed={epochs}",
    ]
    subprocess.run([*command, *settings], cwd=ROOT, capture_output=True, check=True)
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return _Taken(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


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
        command = [sys.executable, "-m", "tests.benchmarks.epoch", "--inside", root]
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
    return (
        "\n".join([*lines, *(f"| {name} | {took.cpu:.2f} | {took.wall:.2f} |" for name, took in rows.items())]) + "\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.stdout.write(json.dumps(inside(sys.argv[2])) + "\n")
    else:
        sys.stdout.write(table())
