"""Costs that grow with an epoch or a store: CPU seconds, requests to S3 and memory, and by which power.

``python -m tools.benchmarks scale``, or ``python -m tools.benchmarks.scale [--samples N ...] [--shards N ...]
[--runs N ...] [--s3]``: one epoch per pair of samples and shards, then a store with more and more runs, on a disk or on
the S3 server that FLOWMILL_TEST_S3_ENDPOINT names. No model works: samples have tiny latents, and the stages' own code
writes the shards. Each operation has a process of its own; its memory is what it adds at most, without mapped files.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flowmill.configs.load import load_config
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import at_rest, list_runs
from flowmill.storage.maintenance.garbage_collection import Retention, plan_removals, remove
from flowmill.storage.maintenance.verify import list_artifacts, verify_store
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.stages.stage import Output, Shard
from flowmill.tasks.stages.stage_run import StageRun
from flowmill.tasks.training.data import TrainingData
from tests.support.inside import cpu, make_stage
from tests.support.s3 import Faults, make_bucket, named_or_moto, unreliable
from tools.benchmarks.learning import ROOT

_GROUP = 10
_Taken = dict[str, tuple[float, ...]]
#: What is done in turn with one epoch, and with a store; what has a star is not measured.
EPOCH = ("*prepare", "commit", "*score", "advantages", "plan", "*optimize", "status", "report", "verify", "gc")
RUNS = ("status of one run", "status of all", "ls", "verify", "gc of one run")


def _begin(root: str, samples: int, shards: int, seed: int = 0) -> RunContext:
    groups = samples // _GROUP
    prompts = Path(tempfile.gettempdir()) / f"flowmill-scale-{groups}.txt"
    prompts.write_text("".join(f"{number:07d}\n" for number in range(groups)))
    settings = [f"store.root={root}", f"run.name=r{seed}", f"prompts.train={prompts}", f"rollout.group_size={_GROUP}"]
    settings += [f"rollout.prompts_per_epoch={groups}", f"rollout.groups_per_shard={groups // shards}", "run.epochs=1"]
    settings += ["rewards=[{name: jpeg_compressibility}]", "evaluate.judges=[]", f"run.seed={seed}"]
    context = begin_run(load_config(ROOT / "configs" / "digits.yaml", settings))
    vars(context)["embeddings"] = SimpleNamespace(digest=lambda texts: "0" * 32)
    return context


def _samples(jobs: Sequence[Any]) -> list[Sample]:
    sigmas, latents, log_probs = [1.0, 0.5, 0.0], np.zeros((3, 1, 2, 2), np.float32), np.zeros(2, np.float32)
    return [
        Sample(
            sample_id=job.name,
            prompt_id=job.prompt.id,
            group_id=job.prompt.id,
            replica=job.replica,
            epoch=1,
            seed=0,
            prompt=job.prompt.text,
            policy="x",
            sigmas=sigmas,
            steps=range(2),
            states=range(3),
            latents=latents,
            log_probs=log_probs,
        )
        for job in jobs
    ]


def _scored(stage: Any, shard: Shard, folder: Path) -> Output:
    table = stage.opened(stage.inputs()[0], shard.name).table
    scores, names = np.random.default_rng(0).random(table.num_rows, np.float32), ("sample_id", "prompt_id", "group_id")
    stage.write(folder, {**{name: table.column(name) for name in names}, "reward": scores, "note": [""] * len(scores)})
    return Output(rows=len(scores), summary={"mean": float(scores.mean())}, content=lambda: "0" * 32)


def _nothing(stage: Any, shard: Shard, folder: Path) -> Output:
    (folder / "file").write_bytes(b"x")
    return Output(rows=1, summary={"updates": []})


#: What replaces a stage's own methods, so that it needs no model.
_STUBS: dict[str, dict[str, Any]] = {
    "base": {"run": _nothing},
    "policy": {"run": _nothing},
    "encode": {"run": _nothing, "shards": lambda stage: [Shard("all")]},
    "rollout": {"maker": SimpleNamespace(make=_samples)},
    "score": {"run": _scored},
    "optimize": {"run": _nothing, "committed": lambda stage, record: None},
}


def _carry_out(context: RunContext, names: Sequence[str]) -> None:
    for node in context.plan.nodes():
        if node.stage in names:
            stage = make_stage(context, node.stage, node.epoch, node.slot)
            if node.stage in _STUBS:
                own = {**_STUBS[node.stage], "parts": frozenset(), "sizes": {}}
                stage.__class__ = type("Stub", (type(stage),), own)
            StageRun(stage).execute()


def _collect(store: ArtifactStore, run: str) -> None:
    with at_rest(store):
        for removal in plan_removals(store, Retention(forget=[run], older_than_s=-1)):
            remove(store, removal)


def operations(root: str, samples: int, shards: int) -> dict[str, Callable[..., object]]:
    """Return the measured operations by name, with runs of some samples in some shards, in the store at ``root``."""

    def stages(*names: str) -> Callable[..., None]:
        return lambda seed=0: _carry_out(_begin(root, samples, shards, seed), names)

    def add(first: int, stop: int) -> None:
        for seed in range(first, stop):
            stages(*_STUBS, "preprocess", "advantage")(seed)

    def plan() -> None:
        stage: Any = make_stage(_begin(root, samples, shards), "optimize", 1)
        data = TrainingData(stage.context, stage.modality, 1, stage.inputs())
        data.plan(data.samples())

    def read(run: str = "r0") -> RunContext:
        return open_run(root, run, reads=True, trusted=True)

    return {
        "prepare": stages("base", "encode", "preprocess", "policy"),
        "commit": stages("rollout"),
        "score": stages("score"),
        "advantages": stages("advantage"),
        "plan": plan,
        "optimize": stages("optimize"),
        **dict.fromkeys(("status", "status of one run"), lambda: describe_run(read())),
        "report": lambda: run_report(read()),
        "verify": lambda: verify_store(ArtifactStore(root), deep=False),
        "gc": lambda: _collect(ArtifactStore(root), "r0"),
        "add": add,
        "status of all": lambda: [describe_run(read(run)) for run in list_runs(ArtifactStore(root))],
        "ls": lambda: list_artifacts(ArtifactStore(root), lambda artifact: False),
        "gc of one run": lambda: _collect(ArtifactStore(root), "r1"),
    }


def _inside(root: str, samples: int, shards: int, name: str, *arguments: int) -> list[float]:
    """Carry out an operation that this process has done before, of a small store; return CPU seconds and MiB."""
    with tempfile.TemporaryDirectory() as small:
        warm = operations(small, 4 * _GROUP, 2)
        warm["add"](0, 2)
        if name != "add":
            warm[name]()
    gc.collect()
    # The most memory that it had is counted from now on.
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _memory("RssAnon"), cpu()
    operations(root, samples, shards)[name](*arguments)
    return [cpu() - began, _memory("VmHWM") - _memory("RssFile") - before]


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def _rows(title: str, sizes: Mapping[str, int], columns: Sequence[_Taken]) -> list[str]:
    """Return the lines of a table, with the powers of the size by which figures grew between the last two."""
    lines = [f"| {title} | {' | '.join(sizes)} | growth |", f"|{'---|' * (len(sizes) + 2)}"]
    for name in columns[0]:
        cells = (f"{cpu:.2f}, {requests:,}, {memory:.0f}" for cpu, requests, memory in (each[name] for each in columns))
        pairs = zip(*(each[name] for each in columns[-2:]), (0.01, 1, 1), strict=True) if len(columns) > 1 else ()
        ratio = list(sizes.values())[-1] / list(sizes.values())[-2:][0]
        powers = (math.log(max(last, least) / max(first, least), ratio) for first, last, least in pairs)
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(f'{power:.1f}' for power in powers)} |")
    return [*lines, ""]


def table(options: argparse.Namespace) -> str:
    """Return CPU seconds, requests and MiB at each size, and the powers of their growth to the last."""
    counted, numbers, lines = Faults(0.0), itertools.count(), list[str]()

    def take(root: str, samples: int, shards: int, *operation: str | int) -> tuple[float, ...]:
        before, work = counted.requests, json.dumps([root, samples, shards, *operation])
        command = [sys.executable, "-m", "tools.benchmarks.scale", "--inside", work]
        seconds, memory = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
        sys.stderr.write(f"{work}: {seconds:.2f} CPU s, {counted.requests - before} requests, {memory:.0f} MiB\n")
        return seconds, counted.requests - before, memory

    with contextlib.ExitStack() as stack:
        top = folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flowmill-scale-"))
        if options.s3:
            server = stack.enter_context(named_or_moto())
            os.environ.update({**server.variables(), "XDG_CACHE_HOME": folder})
            top = f"s3://{make_bucket()}"
            os.environ.update(server.variables(stack.enter_context(unreliable(server, counted))))
        columns: list[_Taken] = []
        points = list(zip(options.samples, options.shards, strict=True))
        for point in points:
            root = f"{top}/{next(numbers)}"
            taken = {name: take(root, *point, name.removeprefix("*")) for name in EPOCH}
            columns.append({name: each for name, each in taken.items() if not name.startswith("*")})
        names = {f"{samples:,} in {shards:,}": samples for samples, shards in points}
        lines += _rows("samples in shards: CPU s, requests, MiB", names, columns) if points else []
        columns, store = [], (f"{top}/{next(numbers)}", 4 * _GROUP, 2)
        for first, stop in itertools.pairwise((0, *options.runs)):
            take(*store, "add", first, stop)
            columns.append({name: take(*store, name) for name in RUNS})
            take(*store, "add", 1, 2)
        lines += _rows("runs in a store", {f"{runs:,}": runs for runs in options.runs}, columns) if options.runs else []
    return "\n".join(lines)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="*", default=[10**4, 10**5, 10**6], help="of each epoch")
    parser.add_argument("--shards", type=int, nargs="*", default=[10**2, 10**3, 10**4], help="of each epoch")
    parser.add_argument("--runs", type=int, nargs="*", default=[10, 100, 1000], help="of the store")
    parser.add_argument("--s3", action="store_true", help="on S3")
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parsed(sys.argv[1:])
    sys.stdout.write(json.dumps(_inside(*given.inside)) if given.inside else table(given))
