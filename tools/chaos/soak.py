"""Trains a tiny model for very many epochs and compares what late epochs take with what early ones took.

``python -m tools.chaos.soak --epochs 1000`` prints per epoch: seconds, CPU seconds, anonymous memory, open files,
threads, requests to the store. With ``--s3`` the store is a bucket and its requests are counted on the way; on a disk
they are the process's calls to read and write. The last hundred epochs are compared with epochs 100 to 200.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from flowmill.flows.environment import prepare_environment
from tests.support.s3 import Faults, make_bucket, named_or_moto, unreliable
from tests.support.small import small_data, write_small

ROOT = Path(__file__).parent.parent.parent
#: Epochs that are compared with the last ones, and how many those are.
_EARLY, _LAST = (100, 200), 100
#: How much more than the early ones the last epochs may take.
_MORE = 1.1
_DONE = re.compile(r"epoch (\d+)/\d+ ")


@dataclass(frozen=True)
class Look:
    """What a run had taken when an epoch was done."""

    seconds: float
    cpu: float
    memory: float
    """Anonymous, in MB."""
    files: float
    threads: float
    requests: float


#: Which of them grow with every epoch, so that their differences are compared.
_SUMS = ("seconds", "cpu", "requests")


def soak(epochs: int, folder: Path, *, s3: bool) -> dict[int, Look]:
    """Train so many epochs, and look at the process after each."""
    from flowmill.models.quickstart.build import DigitsBuilder

    DigitsBuilder(steps=20, vae_steps=20, images=500).build(folder / "base", lambda what, done, total: None)
    data = small_data(folder, folder / "base")
    data["run"]["epochs"], data["evaluate"]["every"] = epochs, 50
    with _store(folder, s3=s3) as (root, variables, requests):
        data["tracking"] = {"uri": f"sqlite:///{folder / 'mlflow.db'}"}
        command = [sys.executable, "-m", "flowmill.flows.cli", "run", str(write_small(folder, data)), "--root", root]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            return dict(_looks(process, requests))


def _looks(process: subprocess.Popen[str], requests: Faults | None) -> Iterator[tuple[int, Look]]:
    found, said = psutil.Process(process.pid), list[str]()
    assert process.stdout is not None
    for line in process.stdout:
        said = [*said[-30:], line]
        done = _DONE.search(line)
        if done:
            with found.oneshot():
                calls = found.io_counters()
                times = found.cpu_times()
                yield (
                    int(done[1]),
                    Look(
                        seconds=time.monotonic(),
                        cpu=times.user + times.system,
                        memory=found.memory_full_info().uss / 1e6,
                        files=found.num_fds(),
                        threads=found.num_threads(),
                        requests=calls.read_count + calls.write_count if requests is None else requests.requests,
                    ),
                )
    if process.wait():
        raise SystemExit("".join(said))


@contextlib.contextmanager
def _store(folder: Path, *, s3: bool) -> Iterator[tuple[str, Mapping[str, str], Faults | None]]:
    if not s3:
        yield str(folder / "store"), {}, None
        return
    with named_or_moto() as server, unreliable(server, counted := Faults(0.0)) as endpoint:
        os.environ.update(server.variables())
        variables = {**server.variables(endpoint), "XDG_CACHE_HOME": str(folder / "cache")}
        yield f"s3://{make_bucket()}/soak", variables, counted


def compare(looks: Mapping[int, Look], early: Sequence[int], late: Sequence[int]) -> Iterator[tuple[str, float, float]]:
    """Yield each figure of early and of late epochs: means of what they took, medians of what they held."""
    for name in Look.__dataclass_fields__:
        if name in _SUMS:
            yield (
                name,
                *(
                    (getattr(looks[span[-1]], name) - getattr(looks[span[0]], name)) / (len(span) - 1)
                    for span in (early, late)
                ),
            )
        else:
            yield name, *(statistics.median(getattr(looks[epoch], name) for epoch in span) for span in (early, late))


def main() -> None:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--s3", action="store_true")
    options = parser.parse_args()
    if options.epochs < _EARLY[1] + _LAST:
        parser.error(f"--epochs must be at least {_EARLY[1] + _LAST}")
    with tempfile.TemporaryDirectory() as folder:
        # The tracking database and Prefect's stay out of the user's own.
        os.environ["PREFECT_HOME"] = f"{folder}/prefect"
        prepare_environment()
        looks = soak(options.epochs, Path(folder), s3=options.s3)
    for epoch in sorted({10, 100, options.epochs}):
        sys.stdout.write(f"memory at epoch {epoch}: {looks[epoch].memory:.1f} MB\n")
    early, late = range(*_EARLY), range(options.epochs - _LAST + 1, options.epochs + 1)
    worse = False
    sys.stdout.write(f"{'':10} {'early':>10} {'late':>10} {'late/early':>10}\n")
    for name, before, after in compare(looks, early, late):
        sys.stdout.write(f"{name:10} {before:10.3f} {after:10.3f} {after / before:10.3f}\n")
        worse = worse or after > _MORE * before
    sys.exit(worse)


if __name__ == "__main__":
    main()
