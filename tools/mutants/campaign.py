"""Runs mutants: each in a copy of the tree, with the tests that belong to the mutated file.

This process imports the libraries once and forks for every mutant, and the tests run on the unchanged copy first, which
leaves its compiled files there: both save most of the time.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("configs", "flowmill", "flows", "models", "storage", "tasks", "tests", "tools")
#: Imported before forking, beside what the unchanged run shows to be needed. Own packages must not be here: a child
#: imports them from its copy.
LIBRARIES = ("pytest", "hypothesis", "torch", "pyarrow.parquet", "transformers", "diffusers", "peft", "sklearn")
#: Not imported before forking: they read the environment, which the tests set.
LATE = ("prefect", "mlflow", "anyio", "__main__", "__mp_main__", "sitecustomize")
_TESTS_FAILED, _TIMEOUT = (1, 2), -signal.SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One run of tests on one changed file."""

    label: str
    """What it is called in the report."""
    path: str
    """The file."""
    content: bytes
    """What it holds instead."""
    tests: tuple[str, ...]
    """Test files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job."""

    job: SampleRequest
    killed: bool
    """A test failed, or the time was over."""
    by: str
    """The test that failed, or 'time limit'."""
    seconds: float
    output: str
    """What pytest wrote."""


@dataclass(slots=True, kw_only=True)
class _Running:
    job: SampleRequest
    process: ForkProcess
    began: float
    log: Path


def run(
    jobs: Sequence[SampleRequest],
    unchanged: Sequence[SampleRequest],
    *,
    processes: int,
    limit: float,
    done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run all jobs and return their outcomes in order of completion.

    Args:
        jobs: what to run.
        unchanged: run first, one after the other and to the end; tests that fail there are left out of the jobs.
        processes: jobs at a time.
        limit: seconds a job may take; one that takes longer counts as killed.
        done: called with each outcome.

    Raises:
        RuntimeError: pytest could not run the tests at all.
    """
    for library in LIBRARIES:
        importlib.import_module(library)
    with TemporaryDirectory(prefix="flowmill-mutants-") as folder:
        template = _copy(Path(folder) / "template")
        left_out: list[str] = []
        for outcome in _run(unchanged, [template], _Settings(limit=4 * limit, compiles=True), done):
            left_out += [line.split()[1] for line in outcome.output.splitlines() if line.startswith("FAILED")]
        _import_needed(template)
        trees = [Path(folder) / str(number) for number in range(processes)]
        for tree in trees:
            shutil.copytree(template, tree)
        return _run(jobs, trees, _Settings(limit=limit, left_out=tuple(left_out)), done)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    limit: float
    compiles: bool = False
    """Leave compiled files in the tree, and a list of imported modules; go on after a failure."""
    left_out: tuple[str, ...] = ()
    """Tests that are not run."""


def _run(
    jobs: Sequence[SampleRequest], trees: Sequence[Path], settings: _Settings, done: Callable[[Outcome], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with _stopped_at_exit() as running:
        waiting, free = list(reversed(jobs)), list(trees)
        while waiting or running:
            while waiting and free:
                tree = free.pop()
                running[tree] = _start(waiting.pop(), tree, settings)
            for tree in _ended(running, settings.limit):
                outcomes.append(_outcome(running.pop(tree), settings.limit))
                shutil.copy2(ROOT / outcomes[-1].job.path, tree / outcomes[-1].job.path)
                free.append(tree)
                done(outcomes[-1])
    return outcomes


def _import_needed(template: Path) -> None:
    """Import what the unchanged run imported, but for own packages and those that read the environment."""
    listed = template / "modules.txt"
    for name in listed.read_text().split() if listed.exists() else ():
        if name.partition(".")[0] not in (*PACKAGES, *LATE):
            with suppress(ImportError, RuntimeError, ValueError):
                importlib.import_module(name)


@contextmanager
def _stopped_at_exit() -> Iterator[dict[Path, _Running]]:
    running: dict[Path, _Running] = {}
    try:
        yield running
    finally:
        for each in running.values():
            _kill(each)


def _copy(target: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis", ".pytest_cache")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, target / name, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target / name)
    return target


def _start(job: SampleRequest, tree: Path, settings: _Settings) -> _Running:
    source = tree / job.path
    if not settings.compiles:
        source.write_bytes(job.content)
        # Compiled files are told apart by second and size alone.
        for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*"):
            compiled.unlink()
    log = tree / "output.txt"
    process = multiprocessing.get_context("fork").Process(target=_child, args=(tree, job.tests, settings, log))
    process.start()
    return _Running(job=job, process=process, began=time.monotonic(), log=log)


def _ended(running: dict[Path, _Running], limit: float) -> list[Path]:
    """Wait for a job to end, kill those that ran too long, and return the trees of all that ended."""
    wait([each.process.sentinel for each in running.values()], timeout=1.0)
    for each in running.values():
        if time.monotonic() - each.began > limit:
            _kill(each)
    return [tree for tree, each in running.items() if not each.process.is_alive()]


def _kill(running: _Running) -> None:
    if running.process.pid is not None and running.process.is_alive():
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.join()


def _outcome(running: _Running, limit: float) -> Outcome:
    running.process.join()
    code, output = running.process.exitcode, running.log.read_text(errors="replace")
    seconds = time.monotonic() - running.began
    if code not in (0, *_TESTS_FAILED, _TIMEOUT):
        raise RuntimeError(f"{running.job.label}: pytest ended with {code}:\n{output[-4000:]}")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    by = f"time limit of {limit:.0f} s" if code == _TIMEOUT else failed[0] if failed else ""
    return Outcome(job=running.job, killed=code != 0, by=by, seconds=seconds, output=output)


def _child(tree: Path, tests: Sequence[str], settings: _Settings, log: Path) -> None:
    """Run pytest in a copy of the tree; this process ends with its exit code."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = not settings.compiles
    if not settings.compiles:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(place for place in sys.path if Path(place or ".").resolve() != ROOT)]
    import hypothesis
    import pytest

    # A loaded machine must not fail a test, and every mutant sees the same examples.
    hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("mutants")
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    left_out = [f"--deselect={test}" for test in settings.left_out]
    stop = [] if settings.compiles else ["-x"]
    code = int(pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *stop, *left_out, *tests]))
    sys.stdout.flush()
    if settings.compiles:
        with (tree / "modules.txt").open("a") as listed:
            listed.write("\n".join([*sys.modules, ""]))
    os._exit(code)
