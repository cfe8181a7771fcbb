"""Damages files of a store and asks verify; ``python -m tools.chaos.losses ROOT --tries 100``.

The store is copied first. Locks, claims, which mean nothing once an artifact is complete, and the tracker's files are
left alone.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import FITS, KINDS, RUNS
from flowmill.storage.maintenance.verify import verify_store

ACTIONS = ("delete", "swap", "double", "flip", "cut")


def files_of(root: Path) -> list[Path]:
    """Return the files that a store is made of."""
    found = (path for kind in (*KINDS, RUNS, FITS) for path in (root / kind).rglob("*"))
    return sorted(path for path in found if path.is_file() and not path.name.startswith((".", "_claim")))


def unseen(root: Path, *, tries: int, seed: int) -> list[str]:
    """Damage a store, one file or pair at a time, and return what verify does not see; the store is as before.

    Args:
        root: a store without damage.
        tries: how many times; each file is deleted once before anything is done twice.
        seed: of the choices.
    """
    rng, missed = random.Random(seed), []
    files = files_of(root)
    deletions = rng.sample(files, len(files))
    for number in range(tries):
        action = ACTIONS[number % len(ACTIONS)]
        before = damage(files, deletions[number // len(ACTIONS) % len(files)], action, rng)
        if not _is_seen(root):
            missed.append(f"{action} {' '.join(str(path.relative_to(root)) for path in before)}")
        for path, content in before.items():
            path.write_bytes(content)
    return missed


def damage(files: Sequence[Path], one: Path, action: str, rng: random.Random) -> dict[Path, bytes]:
    """Damage one of some files, where it may by another of its kind; return what both were before."""
    data, place = one.read_bytes(), rng.random()
    others = [path for path in files if path.suffix == one.suffix and path.read_bytes() != data]
    before = {path: path.read_bytes() for path in (one, rng.choice(others or [one]))}
    changed = bytearray(data)
    if action == "delete" or not data or (action in ("swap", "double") and not others):
        one.unlink()
    elif action == "flip":
        changed[int(place * len(data))] ^= 1 << rng.randrange(8)
        one.write_bytes(changed)
    elif action == "cut":
        one.write_bytes(data[: int(place * len(data))])
    else:
        (_, other) = before
        one.write_bytes(before[other])
        if action == "swap":
            other.write_bytes(data)
    return before


def _is_seen(root: Path) -> bool:
    # What sizes tell needs no look at every byte.
    return any(verify_store(ArtifactStore(str(root)), deep=deep)["problems"] for deep in (False, True))


def main() -> int:
    """Say what is not seen; 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(given.root, Path(folder) / "store")
        missed = unseen(Path(folder) / "store", tries=given.tries, seed=given.seed)
    sys.stdout.write(
        "".join(f"not seen: {line}\n" for line in missed) + f"{given.tries} tries, {len(missed)} not seen\n"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
