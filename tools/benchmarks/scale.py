"""Costs that grow with an epoch or with a store: CPU seconds, requests to S3 and memory, and by which power.

``python -m tools.benchmarks.scale [--samples N ...] [--shards N ...] [--runs N ...] [--s3]`` makes one epoch of so many
samples in so many shards per point, then a store with so many runs, on a disk or on the server that
FLOWMILL_TEST_S3_ENDPOINT names. No model works: samples have tiny random latents. The stages' own code writes shards,
records and lineage. Each operation has a process of its own; its memory is what it adds at most.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
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
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Output, Shard, Stage
from flowmill.tasks.stages.stage_run import StageRun
from flowmill.tasks.training.data import TrainingData
from tests.support.inside import cpu, make_stage, run_stage
from tests.support.s3 import Faults, make_bucket, named_or_moto, unreliable
from tools.benchmarks.learning import ROOT

_GROUP, _REWARD = 10, "jpeg_compressibility"
#: What is measured, after unmeasured preparations, of an epoch and of a store with many runs.
_EPOCH = ("*prepare", "commit", "*score", "advantages", "plan", "*optimize", "status", "report", "verify", "gc")
_RUNS = ("status of one run", "status of all", "ls", "verify", "gc of one run")


def _begin(root: str, samples: int, shards: int, seed: int = 0) -> RunContext:
    groups = samples // _GROUP
    prompts = Path(tempfile.gettempdir()) / f"flowmill-scale-{groups}.txt"
    prompts.write_text("".join(f"{number:07d}\n" for number in range(groups)))
    settings = [f"store.root={root}", f"run.name=r{seed}", f"prompts.train={prompts}", f"rollout.group_size={_GROUP}"]
    settings += [f"rollout.prompts_per_epoch={groups}", f"rollout.groups_per_shard={groups // shards}", "run.epochs=1"]
    settings += [f"rewards=[{{name: {_REWARD}}}]", "evaluate.judges=[]", f"run.seed={seed}"]
    return begin_run(load_config(ROOT / "configs" / "digits.yaml", settings))


class _Sampler:
    def __init__(self, stage: Any) -> None:
        self._random, self._epoch = np.random.default_rng(0), stage.epoch

    def make(self, jobs: Sequence[Any]) -> list[Sample]:
        latents = self._random.standard_normal((len(jobs), 3, 1, 2, 2), np.float32)
        return [
            Sample(
                sample_id=job.name,
                prompt_id=job.prompt.id,
                group_id=job.prompt.id,
                prompt=job.prompt.text,
                epoch=self._epoch,
                replica=job.replica,
                seed=0,
                policy="x",
                sigmas=[1.0, 0.5, 0.0],
                steps=range(2),
                states=range(3),
                log_probs=np.zeros(2, np.float32),
                latents=rows,
            )
            for job, rows in zip(jobs, latents, strict=True)
        ]


def _scored(stage: Any, shard: Shard, folder: Path) -> Output:
    (table,) = (each.table for each in stage.opened(shard, stage.inputs()[0]))
    scores = np.random.default_rng(shard.start).standard_normal(table.num_rows).astype(np.float32)
    names = {name: table.column(name) for name in ("sample_id", "prompt_id", "group_id")}
    stage.write(folder, {**names, "reward": scores, "note": [""] * len(scores)})
    return Output(rows=len(scores), summary={"mean": float(scores.mean())}, content=lambda: "0" * 32)


def _nothing(stage: Any, shard: Shard, folder: Path) -> Output:
    (folder / "file").write_bytes(b"x")
    return Output(rows=1, summary={"updates": []})


def _without_model(context: RunContext, node: Node) -> None:
    """Carry out a stage without its model."""
    stage, work = make_stage(context, *node[1:2], node.epoch, node.slot), {"score": _scored}.get(node.stage, _nothing)
    own: dict[str, Any] = {"maker": property(_Sampler)} if node.stage == "rollout" else {"run": work}
    own |= {"shards": lambda self: [Shard("all")]} if node.stage == "encode" else {}
    own |= {"committed": lambda self, record: None} if node.stage == "optimize" else {}
    own |= {"parts": frozenset(), "sizes": {}}
    stage.__class__ = type("Stub", (type(stage),), own)
    StageRun(stage).execute()


def _stages(context: RunContext, names: Sequence[str]) -> None:
    vars(context)["embeddings"] = SimpleNamespace(digest=lambda texts: "0" * 32)
    for node in context.plan.nodes():
        if node.stage in names and node.epoch < 2:
            real = node.stage in ("preprocess", "advantage")
            run_stage(context, node.stage, node.epoch, node.slot) if real else _without_model(context, node)


def _plan(context: RunContext) -> None:
    stage: Stage = make_stage(context, "optimize", 1)
    data = TrainingData(context, stage.policy_kind, 1, stage.inputs())
    data.plan(data.samples())


def _collect(store: ArtifactStore, run: str) -> None:
    with at_rest(store):
        for removal in plan_removals(store, Retention(forget=[run], older_than_s=-1)):
            remove(store, removal)


def _work(root: str, samples: int, shards: int) -> dict[str, Callable[..., object]]:
    """Return what each operation does; the first is of one epoch, the last of a store."""

    def stages(*names: str) -> Callable[..., None]:
        return lambda seed=0: _stages(_begin(root, samples, shards, seed), names)

    def add(first: int, stop: int) -> None:
        for seed in range(first, stop):
            stages("base", "encode", "preprocess", "policy", "rollout", "score", "advantage", "optimize")(seed)

    def described() -> list[dict[str, Any]]:
        return [describe_run(read(run)) for run in list_runs(ArtifactStore(root))]

    def read(run: str = "r0") -> RunContext:
        return open_run(root, run, reads=True, trusted=True)

    return {
        "prepare": stages("base", "encode", "preprocess", "policy"),
        "commit": stages("rollout"),
        "score": stages("score"),
        "advantages": stages("advantage"),
        "plan": lambda: _plan(_begin(root, samples, shards)),
        "optimize": stages("optimize"),
        "status": lambda: describe_run(read()),
        "report": lambda: run_report(read()),
        "verify": lambda: verify_store(ArtifactStore(root), deep=False),
        "gc": lambda: _collect(ArtifactStore(root), "r0"),
        "add": add,
        "status of one run": lambda: describe_run(read()),
        "status of all": described,
        "ls": lambda: list_artifacts(ArtifactStore(root), lambda artifact: False),
        "gc of one run": lambda: _collect(ArtifactStore(root), "r1"),
    }


def _serve(root: str, samples: int, shards: int) -> None:
    """Carry out operations, a line of standard input each, in forks of a process that has done all of them before."""
    with tempfile.TemporaryDirectory() as small:
        warm = _work(small, 4 * _GROUP, 2)
        warm["add"](1, 3)
        for name in (*_EPOCH[:-1], *_RUNS, "gc"):
            warm[name.removeprefix("*")]()
    work = _work(root, samples, shards)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        gc.collect()
        if child := os.fork():
            if os.waitpid(child, 0)[1]:
                sys.exit(1)
            continue
        before, began = _own_memory(), cpu()
        with _peak() as seen:
            work[name](*arguments)
        sys.stdout.write(json.dumps([cpu() - began, max(seen) - before]) + "\n")
        sys.stdout.flush()
        os._exit(0)


@contextlib.contextmanager
def _peak() -> Iterator[list[float]]:
    """Give the list of the memory of this process, measured every hundredth of a second."""
    seen, done = [_own_memory()], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            seen.append(_own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
    seen.append(_own_memory())


def _own_memory() -> float:
    """Return the memory of this process without pages of files, in MiB."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize() / 2**20


class _Server:
    """The process of ``_serve``, and the requests of its operations."""

    def __init__(self, root: str, samples: int, shards: int, counted: Faults) -> None:
        command = [sys.executable, "-m", "tools.benchmarks.scale", "--inside", root, str(samples), str(shards)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._counted = counted

    def take(self, *operation: object) -> tuple[float, ...]:
        """Carry out an operation; return CPU seconds, requests and MiB."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        before = self._counted.requests
        self._process.stdin.write(json.dumps(operation) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{operation} failed")
        seconds, memory = json.loads(line)
        return seconds, self._counted.requests - before, memory

    def take_all(self, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """Carry out operations, and return what those took that are measured."""
        taken = {}
        for name in names:
            taken[name] = self.take(name.removeprefix("*"))
            sys.stderr.write(f"{name} {taken[name]}\n")
        return {name: each for name, each in taken.items() if not name.startswith("*")}

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _measured(root: Callable[[], str], counted: Faults, points: Sequence[tuple[int, int]], runs: Sequence[int]) -> str:
    """Return both tables, of one epoch per point of samples and shards, and of a store with ever more runs."""
    columns: list[dict[str, tuple[float, ...]]] = []
    for samples, shards in points:
        with contextlib.closing(_Server(root(), samples, shards, counted)) as server:
            columns.append(server.take_all(_EPOCH))
    names, sizes = [f"{samples:,} in {shards:,}" for samples, shards in points], [samples for samples, _ in points]
    tables = [_table("an epoch: samples in shards", names, columns, sizes)] if points else []
    if runs:
        columns, done = [], 0
        with contextlib.closing(_Server(root(), 4 * _GROUP, 2, counted)) as server:
            for count in runs:
                server.take("add", done, count)
                done = count
                columns.append(server.take_all(_RUNS))
                server.take("add", 1, 2)
        tables.append(_table("a store: runs", [f"{count:,}" for count in runs], columns, runs))
    return "\n\n".join(tables)


def _table(
    title: str, names: Sequence[str], columns: Sequence[dict[str, tuple[float, ...]]], sizes: Sequence[int]
) -> str:
    lines = [f"| {title} | {' | '.join(names)} | exponents |", f"|{'---|' * (len(names) + 2)}"]
    for name in columns[0]:
        cells = [f"{cpu:.2f} s, {requests:,}, {memory:.0f} MiB" for cpu, requests, memory in (c[name] for c in columns)]
        lines.append(f"| {name} | {' | '.join(cells)} | {_growth([c[name] for c in columns[-2:]], sizes[-2:])} |")
    return "\n".join(lines)


def _growth(taken: Sequence[tuple[float, ...]], sizes: Sequence[int]) -> str:
    """Return the powers of the size with which CPU seconds, requests and memory grow between the last two sizes."""
    if len(sizes) < 2:
        return ""
    pairs = zip(*taken, strict=True)
    least = (0.01, 1, 1)
    powers = (
        math.log(max(after, low) / max(before, low), sizes[1] / sizes[0])
        for (before, after), low in zip(pairs, least, strict=True)
    )
    return ", ".join(f"{power:.1f}" for power in powers)


def table(samples: Sequence[int], shards: Sequence[int], runs: Sequence[int], *, s3: bool) -> str:
    """Return CPU seconds, requests and memory at each size, and the powers of their growth to the last."""
    points, counted = list(zip(samples, shards, strict=True)), Faults(0.0)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flowmill-scale-")))
        numbers = itertools.count()
        if not s3:
            return _measured(lambda: str(folder / f"store{next(numbers)}"), counted, points, runs)
        server = stack.enter_context(named_or_moto())
        endpoint = stack.enter_context(unreliable(server, counted))
        os.environ.update({**server.variables(), "XDG_CACHE_HOME": str(folder / "cache")})
        bucket = make_bucket()
        os.environ.update(server.variables(endpoint))
        return _measured(lambda: f"s3://{bucket}/{next(numbers)}", counted, points, runs)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="*", default=[10**4, 10**5, 10**6], help="of each epoch")
    parser.add_argument("--shards", type=int, nargs="*", default=[10**2, 10**3, 10**4], help="of each epoch")
    parser.add_argument("--runs", type=int, nargs="*", default=[10, 100, 1000], help="of the store")
    parser.add_argument("--s3", action="store_true", help="on S3")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        root, samples, shards = options.inside
        _serve(root, int(samples), int(shards))
    else:
        sys.stdout.write(table(options.samples, options.shards, options.runs, s3=options.s3) + "\n")


if __name__ == "__main__":
    main()
