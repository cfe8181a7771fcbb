"""What a person does to a store between two kills: look for damage, repair it, remove what nobody needs; killed too.

Damage is done first, to one file drawn at random. Whatever is done in whichever order, and wherever it is cut short,
nothing may be lost: no run, and no artifact that a run names.
"""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import list_runs
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.verify import users_of
from tools.chaos.kills import start
from tools.chaos.losses import damage, files_of

#: The longest a command may take, and the moments at which it is killed.
_PATIENCE_S, _KILLED_S = 900, 15.0
_GC = ("gc", "--delete", "--older-than", "0", "--keep-epochs", "1")


class Tending:
    """Damages a store, and has it looked after by commands that may be killed."""

    def __init__(self, rng: random.Random, environment: Mapping[str, str]) -> None:
        """Begin without anything done.

        Args:
            rng: draws damage and moments.
            environment: of the commands.
        """
        self._rng, self._environment = rng, dict(environment)
        self.done: Counter[str] = Counter()
        """How often each was done."""

    def tend(self, root: Path) -> list[str]:
        """Damage the store of a killed run, repair it and remove what may go; return what was not as it should be."""
        before = _named(root)
        wrong = [] if not before else self._looked_after(root)
        lost = sorted(before - _named(root))
        return wrong + [f"{name} is gone" for name in lost]

    def _looked_after(self, root: Path) -> list[str]:
        wrong = [] if self._verified(root) else ["verify finds damage after a kill alone"]
        damage = self._damage(root)
        if self._verified(root):
            wrong.append(f"verify does not see: {damage}")
        # Of a damaged run it removes nothing, of a damaged artifact it cannot say what it is.
        self._run_command(root, *_GC)
        for command in (("repair",), _GC):
            while self._rng.random() < 0.5:
                self._killed(root, *command)
            code, said = self._run_command(root, *command)
            if code:
                wrong.append(f"{command[0]} exits with {code} after: {damage}: {said[-400:]}")
            if not self._verified(root):
                wrong.append(f"after {command[0]} there is damage, of: {damage}")
        return wrong

    def _damage(self, root: Path) -> str:
        files = files_of(root)
        one, kind = self._rng.choice(files), self._rng.choice(("delete", "double", "flip", "cut"))
        damage(files, one, kind, self._rng)
        self.done[kind] += 1
        return f"{kind} of {one.relative_to(root)}"

    def _verified(self, root: Path) -> bool:
        return self._run_command(root, "verify", "--deep")[0] == 0

    def _killed(self, root: Path, *command: str) -> None:
        process = self._start(root, *command)
        try:
            process.wait(self._rng.random() * _KILLED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            self.done[f"{command[0]} killed"] += 1
        process.communicate(timeout=_PATIENCE_S)

    def _run_command(self, root: Path, *command: str) -> tuple[int, str]:
        """Return exit code and output of a command, which a traceback makes wrong."""
        process = self._start(root, *command)
        said = process.communicate(timeout=_PATIENCE_S)[0].decode()
        self.done[command[0]] += 1
        return (99 if "Traceback" in said else process.returncode), said

    def _start(self, root: Path, *command: str) -> subprocess.Popen[bytes]:
        name, *rest = command
        return start(["store", name, "--root", str(root), *rest], self._environment)


def _named(root: Path) -> set[str]:
    """Return the runs of a store, and the complete artifacts that they name."""
    store = ArtifactStore(str(root))
    named = [ArtifactRef.parse(name) for name in users_of(store)]
    return {*(f"runs/{name}" for name in list_runs(store)), *(str(ref) for ref in named if _is_complete(store, ref))}


def _is_complete(store: ArtifactStore, ref: ArtifactRef) -> bool:
    return bool(store.committed(ref)) if ref.kind == "embeddings" else store.manifest(ref) is not None
