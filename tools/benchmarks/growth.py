"""Whether an epoch of many groups costs more per group than one of few: CPU seconds and anonymous memory.

python -m tools.benchmarks.growth
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import torch

from configs.load import load_config
from tasks.modalities.rows import micro_batches, plan_updates, single_rows
from tests.support.inside import cpu, prepare, run_epoch
from tools.benchmarks.learning import ROOT

GROUPS = (4, 16, 40, 160)
#: Batches that every number of groups fills: rows that only pad would be more of an epoch of few.
_FILLED = ("rollout.groups_per_shard=4", "execution.rollout_batch_size=48", "execution.micro_batch_size=192")


def one(groups: int, root: str) -> dict[str, float]:
    """Train two epochs of digits with so many groups; return figures of the second."""
    torch.set_num_threads(1)
    prompts = Path(root) / f"prompts-{groups}.txt"
    # Of two digits there are not enough; what is read in the images does not matter here.
    prompts.write_text("".join(f'"{number:03d}"\n' for number in range(groups)))
    settings = [f"store.root={root}", f"rollout.prompts_per_epoch={groups}", f"run.name=g{groups}"]
    settings += [f"prompts.train={prompts}", "rewards=[{name: jpeg_compressibility}]", *_FILLED]
    context = prepare(load_config(ROOT / "configs" / "digits.yaml", settings))
    run_epoch(context, 1)
    highest, done = [_anonymous_mib()], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            highest[0] = max(highest[0], _anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        seconds = run_epoch(context, 2)
    finally:
        done.set()
        watcher.join()
    return {"cpu": seconds / groups, "mib": highest[0]}


def table() -> str:
    """Return a table of all sizes, each in a process of its own, one after the other."""
    lines = ["| groups of 12 | CPU s per group | anonymous memory, MiB |", "|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="flowmill-growth-") as root:
        # The first process trains the base model too.
        _in_process(1, root)
        for groups in GROUPS:
            found = _in_process(groups, root)
            lines.append(f"| {groups} | {found['cpu']:.4f} | {found['mib']:.0f} |")
    return "\n".join(lines) + f"\n\n{planning()}\n"


def _in_process(groups: int, root: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tools.benchmarks.growth", "--one", str(groups), root]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def planning(samples: int = 125_000, steps: int = 8) -> str:
    """Return what planning the updates of an epoch of many rows takes, down to its micro-batches."""
    begun = cpu()
    units = single_rows(np.arange(samples), np.full(samples, steps))
    plan = plan_updates(units, updates=8, inner_epochs=1, seed=0, epoch=1)
    batches = sum(len(micro_batches(part, 256)) for part in plan)
    return f"Planning {samples * steps:,} rows, in {batches:,} micro-batches: {cpu() - begun:.2f} CPU s."


def _anonymous_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.stdout.write(json.dumps(one(int(sys.argv[2]), sys.argv[3])) + "\n")
    else:
        sys.stdout.write(table())
