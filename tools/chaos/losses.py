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
        one = deletions[number // len(ACTIONS) % len(files)]
        data = one.read_bytes()
        other = rng.choice([path for path in files if path.suffix == one.suffix and path.read_bytes() != data] or [one])
        before = {path: path.read_bytes() for path in (one, other)}
        if action in ("flip", "cut") and data:
            one.write_bytes(spoiled(data, action, rng))
        elif action not in ("swap", "double") or other == one:
            one.unlink()
        else:
            one.write_bytes(before[other])
            if action == "swap":
                other.write_bytes(before[one])
        if not _is_seen(root):
            missed.append(f"{action} {one.relative_to(root)} {other.relative_to(root)}")
        for path, content in before.items():
            path.write_bytes(content)
    return missed


def spoiled(data: bytes, action: str, rng: random.Random) -> bytes:
    """Return some bytes with one bit flipped, or cut off anywhere."""
    place = rng.randrange(len(data))
    if action == "cut":
        return data[:place]
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


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
