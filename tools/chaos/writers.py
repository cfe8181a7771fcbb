"""Kills concurrent writers of one store at random moments and compares the store with one written in peace.

python -m tools.chaos.writers --kills 200 --root FOLDER-OR-S3-URI
python -m tools.chaos.writers --kills 0 --seconds 30 --root s3://...    while something else disturbs the server
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.schema import StoreSection
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.verify import verify_store
from flowmill.storage.trajectories.base import Sample
from flowmill.storage.trajectories.webdataset import WebDatasetStore
from tests.support.trajectories import write_samples

SHARDS = 6
_context = multiprocessing.get_context("fork")


def reference(number: int) -> ArtifactRef:
    """Return the artifact of a number."""
    return ArtifactRef("trajectories", f"{number:032x}")


def write_shard(store: ArtifactStore, number: int, shard: int) -> None:
    """Write and commit one shard of small samples, unless it is committed."""
    ref, name = reference(number), f"{shard:06d}-{shard + 1:06d}"
    if store.record(ref, name) is not None:
        return
    rng = np.random.default_rng([number, shard])
    samples = [
        Sample(
            sample_id=f"a{number}-s{shard}-{i}",
            prompt_id="p",
            group_id="p",
            prompt="x",
            epoch=1,
            replica=i,
            seed=i,
            policy="policies/x",
            sigmas=[1.0, 0.0],
            states=[0, 1],
            steps=[0],
            log_probs=np.zeros(1, np.float32),
            latents=rng.normal(size=(2, 4, 16, 16)).astype(np.float32),
        )
        for i in range(4)
    ]
    with store.root.staging() as folder:
        write_samples(WebDatasetStore(), folder, samples)
        store.commit(ref, name, folder, rows=len(samples))


def write_artifact(store: ArtifactStore, number: int, seed: int) -> None:
    """Write an artifact's shards in an order of one's own, and seal it."""
    ref = reference(number)
    if store.manifest(ref) is not None:
        return
    order = list(range(SHARDS))
    random.Random(seed).shuffle(order)
    for shard in order:
        write_shard(store, number, shard)
    names = [f"{shard:06d}-{shard + 1:06d}" for shard in range(SHARDS)]
    store.seal(ref, shards=names, summary={}, stage="rollout", stage_version=1, options={}, inputs=())


def write(section: dict[str, Any], seed: int, shared: _Shared) -> None:
    """Write artifact after artifact until told to stop, then all up to the last anyone began."""
    store = ArtifactStore(StoreSection.model_validate(section))
    number = 0
    while not shared.stopped or number <= shared.last:
        shared.reached(number)
        write_artifact(store, number, seed + number)
        number += 1


def digest(store: ArtifactStore, artifacts: int) -> str:
    """Return one hash over the content of all artifacts."""
    return fingerprint([store.require(reference(number)).digest for number in range(artifacts)])


@dataclass(frozen=True)
class Outcome:
    """What a series of kills came to."""

    kills: int
    artifacts: int
    failures: int
    problems: list[str]
    digest: str
    expected: str


def run(
    section: StoreSection, *, writers: int, kills: int, seed: int, pause: float = 0.15, seconds: float = 0
) -> Outcome:
    """Kill writers ``kills`` times, let them finish, and compare.

    A writer that ends with an error of its own counts as a failure.
    """
    rng, shared = random.Random(seed), _Shared()
    failures, plain = 0, section.model_dump()

    def start(number: int) -> Any:
        process = _context.Process(target=write, args=(plain, seed + 1000 * number, shared))
        process.start()
        return process

    running = [start(number) for number in range(writers)]
    for hit in range(kills):
        time.sleep(rng.random() * pause)
        chosen = rng.randrange(writers)
        if running[chosen].exitcode is None:
            os.kill(running[chosen].pid, signal.SIGKILL)
        running[chosen].join()
        failures += running[chosen].exitcode not in (0, -signal.SIGKILL)
        running[chosen] = start(writers + hit)
    time.sleep(seconds)
    shared.stop()
    for process in running:
        process.join()
        failures += process.exitcode != 0
    # Whoever began the last artifact may have been killed: one more finishes it.
    final = start(0)
    final.join()
    failures += final.exitcode != 0
    with tempfile.TemporaryDirectory() as folder:
        return _compare(section, folder, kills, failures, shared.last + 1, seed)


def _compare(section: StoreSection, folder: str, kills: int, failures: int, artifacts: int, seed: int) -> Outcome:
    def look(connection: Any) -> None:
        # In a process of its own: the parent stays without threads, so that it can fork again.
        store, whole = ArtifactStore(section), ArtifactStore(folder)
        store.root.sweep()
        for number in range(artifacts):
            write_artifact(whole, number, seed)
        problems = verify_store(store, deep=True)["problems"]
        connection.send((problems, digest(store, artifacts), digest(whole, artifacts)))

    here, there = _context.Pipe()
    process = _context.Process(target=look, args=(there,))
    process.start()
    problems, found, expected = here.recv()
    process.join()
    return Outcome(kills, artifacts, failures, problems, found, expected)


class _Shared:
    """The highest artifact anyone began, and whether to stop: memory without a lock, which a killed writer would keep.

    An event of multiprocessing has one, which asking it takes.
    """

    def __init__(self) -> None:
        self._last, self._stopped = _context.RawValue("q", -1), _context.RawValue("b", 0)

    @property
    def last(self) -> int:
        return int(self._last.value)

    @property
    def stopped(self) -> bool:
        return bool(self._stopped.value)

    def reached(self, number: int) -> None:
        self._last.value = max(self.last, number)

    def stop(self) -> None:
        self._stopped.value = 1


def main() -> None:
    """Kill, finish, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.15, help="longest time between kills")
    parser.add_argument("--seconds", type=float, default=0, help="time to write undisturbed by kills")
    parser.add_argument("--root", required=True)
    options = parser.parse_args()
    section = StoreSection(root=options.root)
    chosen = {name: getattr(options, name) for name in ("writers", "kills", "seed", "pause", "seconds")}
    outcome = run(section, **chosen)
    sys.stdout.write(
        f"{outcome.kills} kills, {outcome.artifacts} artifacts, {outcome.failures} failures of writers of their own\n"
        f"verify: {outcome.problems or 'clean'}\nuninterrupted {outcome.expected}\nkilled        {outcome.digest}\n"
    )
    sys.exit(bool(outcome.problems) or outcome.failures > 0 or outcome.expected != outcome.digest)


if __name__ == "__main__":
    main()
