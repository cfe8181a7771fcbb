"""Setting damaged shards aside, so that their stage makes them anew; nothing is deleted."""

from __future__ import annotations

from storage import layout
from storage.commit import ArtifactStore
from storage.layout import QUARANTINE
from storage.verify import Problem


def quarantine(store: ArtifactStore, problem: Problem) -> list[str]:
    """Move what a problem is about below ``quarantine/``; return what was moved.

    The manifest goes first: from then on the artifact is incomplete and nobody trusts its shards to be all there. The
    record goes last: killed halfway, the same damage is found again.
    """
    ref = problem.ref
    if ref is None:
        paths = [problem.path]
    elif problem.kind == "orphaned":
        paths = [problem.message.partition(" ")[0]]
    else:
        paths = [layout.manifest(ref)]
        if problem.shard is not None:
            held = store.root.list(ref.path)
            paths += [f"{ref.path}/{name}" for name in held if name.rpartition("-")[0] == problem.shard]
            paths.append(layout.record(ref, problem.shard))
    moved = []
    for path in paths:
        parent, _, name = path.rpartition("/")
        if name in store.root.list(parent):
            store.root.move(path, _free(store, f"{QUARANTINE}/{path}"))
            moved.append(path)
    return moved


def _free(store: ArtifactStore, path: str) -> str:
    """Return the path, with a number where something lies there already."""
    parent, _, name = path.rpartition("/")
    taken = set(store.root.list(parent))
    if name not in taken:
        return path
    number = next(n for n in range(2, len(taken) + 3) if f"{name}.{n}" not in taken)
    return f"{path}.{number}"
