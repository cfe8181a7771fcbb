"""Damaged configs, prompt files and stores: each is refused with a message or works; none ends in a traceback or hangs.

``python -m tools.chaos.fuzz --configs 3000 --prompts 2000 --flips 600 --seed 0``
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flowmill.configs.errors import FlowmillError
from flowmill.configs.load import load_config
from flowmill.configs.schema import PromptsSection
from flowmill.flows.environment import prepare_environment
from flowmill.tasks.reports.dataset import export_run
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runtime.process_memory import process_peak

ROOT = Path(__file__).parent.parent.parent
_HANGS_S = 20
_SPLICES = (
    b"\x00",
    b"\xff\xfe",
    b": ",
    b"- ",
    b"{",
    b"[",
    b"&a ",
    b"*a",
    b"!!python/object:os.system ",
    b"1e999",
    b".nan",
    b"-1",
    b"null",
    b"'",
    b'"',
    b"\r",
    "\u2028".encode(),
    b"2026-11-23",
    b"9" * 50,
    b"../../x",
    b"~",
)


class Findings:
    """What became of the inputs of one kind."""

    def __init__(self) -> None:
        """Start with none."""
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0
        self.broken: list[str] = []

    def look(self, what: str, use: Callable[[], object]) -> None:
        """Use one input, and note how that ended."""
        begun = time.monotonic()
        try:
            with _alarm(_HANGS_S):
                use()
            self.counts["works"] += 1
        except FlowmillError:
            self.counts["refused"] += 1
        except BaseException:
            if isinstance(sys.exception(), KeyboardInterrupt):
                raise
            self.counts["TRACEBACK"] += 1
            self.broken.append(f"{what}\n{traceback.format_exc()}")
        self.slowest = max(self.slowest, time.monotonic() - begun)


@contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def hang(number: int, frame: object) -> None:
        raise TimeoutError(f"nothing came of it in {seconds} s")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return some bytes with one to four of them changed, cut out, doubled, or something hostile put between."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place, length = rng.randrange(len(found) + 1), rng.randint(1, 12)
        kind = rng.randrange(4)
        if kind == 0 and found:
            found[min(place, len(found) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[place : place + length]
        elif kind == 2:
            found[place:place] = found[place : place + length]
        else:
            found[place:place] = rng.choice(_SPLICES)
    return bytes(found)


def configs(count: int, rng: random.Random, folder: Path) -> Findings:
    """Read mutated presets."""
    from flowmill.tasks.checks.names import check_names

    presets = sorted((ROOT / "configs").glob("*.yaml"))
    findings, path = Findings(), folder / "mutated.yaml"
    for link in ("prompts", *(preset.name for preset in presets)):
        (folder / link).symlink_to(ROOT / "configs" / link)
    for number in range(count):
        preset = rng.choice(presets)
        path.write_bytes(mutated(preset.read_bytes(), rng))
        findings.look(
            f"config {number}, of {preset.name}: {path.read_bytes()!r}", lambda: check_names(load_config(path))
        )
    return findings


def prompts(count: int, rng: random.Random, folder: Path) -> Findings:
    """Read mutated prompt files of every kind."""
    from flowmill.tasks.inputs.prompts import read_prompts

    words = [f"a photo of {number} cats, \u00e9\u4e2d" for number in range(20)]
    rows = [{"prompt": word, "count": number, "tags": ["x", word]} for number, word in enumerate(words)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "whole.parquet")
    whole = {
        "txt": "\n".join(words).encode(),
        "jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode(),
        "parquet": (folder / "whole.parquet").read_bytes(),
    }
    findings = Findings()
    for number in range(count):
        kind = rng.choice(sorted(whole))
        path = folder / f"mutated-{number}.{kind}"
        path.write_bytes(mutated(whole[kind], rng))
        section = PromptsSection(train=str(path))
        findings.look(
            f"prompts {number}, {kind}: {path.read_bytes()[:300]!r}",
            partial(read_prompts, str(path), section, where="prompts.train"),
        )
        path.unlink()
    return findings


def flips(count: int, rng: random.Random, folder: Path) -> Findings:
    """Flip one bit of a file of a store, look at the store with everything that reads, and put the bit back."""
    from flowmill.storage.artifacts.commit import ArtifactStore
    from flowmill.storage.maintenance.verify import list_artifacts, verify_store
    from flowmill.tasks.metrics.describe import describe_run
    from flowmill.tasks.runs.opening import open_run

    root = str(_store(folder))
    files = [
        file
        for file in sorted(Path(root).rglob("*"))
        if file.is_file() and file.stat().st_size and ".staging" not in file.parts and file.suffix != ".db"
    ]

    def read_all() -> None:
        store = ArtifactStore(root)
        verify_store(store, deep=True)
        for use in (
            lambda: list_artifacts(store),
            lambda: describe_run(open_run(root, "small", reads=True)),
            lambda: open_run(root, "small", reads=True).chain.digest(),
            lambda: _exported(open_run(root, "small", reads=True), folder / "out"),
        ):
            try:
                use()
            except FlowmillError:
                continue

    findings = Findings()
    for number in range(count):
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        place = rng.randrange(len(data) * 8)
        data[place // 8] ^= 1 << place % 8
        whole = file.read_bytes()
        file.write_bytes(data)
        findings.look(f"bit {place} of {file.relative_to(root)}", read_all)
        file.write_bytes(whole)
    return findings


def _exported(context: RunContext, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    export_run(context, folder, "parquet", epochs=(), progress=lambda done, total: None)


def _store(folder: Path) -> Path:
    """Make a run of one epoch."""
    from flowmill.models.quickstart.build import DigitsBuilder
    from tests.support.inside import evaluate, prepare, run_epoch
    from tests.support.small import small_data, write_small

    base = folder / "base"
    DigitsBuilder(steps=20, vae_steps=20, images=500).build(base, lambda what, done, total: None)
    context = prepare(load_config(write_small(folder, small_data(folder, base)), ["run.epochs=1"]))
    run_epoch(context, 1)
    evaluate(context, 1)
    return folder / "store"


def main() -> None:
    """Carry out the campaign and print its table; exit with 1 if anything ended in a traceback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=int, default=3000)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--flips", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare_environment()
    broken: list[str] = []
    line = "{:9} {:>6} {:>8} {:>8} {:>11} {:>10}\n"
    sys.stdout.write(line.format("input", "number", "works", "refused", "tracebacks", "slowest"))
    for name, look in (("configs", configs), ("prompts", prompts), ("flips", flips)):
        with tempfile.TemporaryDirectory(prefix="flowmill-fuzz-") as folder:
            number = getattr(options, name)
            found = look(number, random.Random(f"{options.seed}/{name}"), Path(folder))
        counts = [found.counts[kind] for kind in ("works", "refused", "TRACEBACK")]
        sys.stdout.write(line.format(name, number, *counts, f"{found.slowest:.2f} s"))
        sys.stdout.flush()
        broken += found.broken
    sys.stdout.write(f"peak memory {process_peak() / 1e9:.2f} GB\n")
    for each in broken[:20]:
        sys.stdout.write(f"\n{each}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
