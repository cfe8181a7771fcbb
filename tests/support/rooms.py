"""The rooms of the house and the imports between them, read from the code: ``python -m tests.support.rooms``.

Deferred imports and those for types alone count like all others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "storage", "models", "tasks", "flows", "flowmill", "pages", "tests", "tools")
#: Rooms inside a package, lowest first: each imports only those before it. Single files have a place among them.
ORDER: Mapping[str, tuple[str, ...]] = {
    "storage": ("names", "layout", "backends", "artifacts", "trajectories", "maintenance"),
    "models": (
        "library_loading",
        "devices",
        "picture_colors",
        "films",
        "image_files",
        "text",
        "maths",
        "weights",
        "policies",
        "quickstart",
        "memory",
        "serving",
        "rewards",
        "engines",
    ),
    "tasks": (
        "advantages",
        "algorithms",
        "inputs",
        "specs",
        "runs",
        "choices",
        "metrics",
        "export",
        "runtime",
        "modalities",
        "training",
        "fitting",
        "stages",
        "execution",
        "checks",
        "ratings",
        "reports",
        "tracking",
    ),
}


_KINDS = {f"tasks.modalities.{path.parent.name}" for path in (ROOT / "tasks" / "modalities").glob("*/__init__.py")}


@cache
def modules() -> dict[str, Path]:
    """Return all files by the name they are imported by."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return which of our own files each file imports."""
    return {name: frozenset(_imported(path)) - {name} for name, path in modules().items()}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = (short(alias.name) for alias in node.names)
            yield from (name for name in names if name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                outer, inner = short(node.module), short(f"{node.module}.{alias.name}")
                yield from (name for name in (inner if inner in modules() else outer,) if name in modules())


def short(name: str) -> str:
    """Return a module's name from its folder on, without flowmill's own name."""
    inner = name.removeprefix("flowmill.")
    return inner if inner.split(".")[0] in PACKAGES else name


def room_of(name: str) -> str:
    """Return the room of a file: the folder below a package, or the package itself; each kind of policy has its own."""
    parts = name.split(".")
    inside = parts[0] in ("models", "tasks") and len(parts) > 1
    deep = 3 if len(parts) > 2 and ".".join(parts[:3]) in _KINDS else 2
    return ".".join(parts[:deep]) if inside else parts[0]


def upward() -> list[tuple[str, str]]:
    """Return imports of a room that stands later, (importer, imported)."""
    found = []
    for name, others in imports().items():
        package, *rest = name.split(".")
        order = ORDER.get(package)
        if order is None or not rest:
            continue
        inside = (other.split(".") for other in others if other.startswith(f"{package}."))
        later = (parts for parts in inside if order.index(parts[1]) > order.index(rest[0]))
        found += [(name, ".".join(parts)) for parts in later]
    return found


def circles() -> list[list[str]]:
    """Return groups of files that import each other, directly or not (Tarjan's strongly connected components)."""
    graph, index, low = imports(), dict[str, int](), dict[str, int]()
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def lines_of(name: str) -> int:
    """Return the lines of a file."""
    return len(modules()[name].read_text(encoding="utf-8").splitlines())


def table() -> str:
    """Return the rooms as a Markdown table: files, lines, and the rooms of the same package that each imports."""
    rooms: dict[str, list[str]] = {}
    for name in modules():
        rooms.setdefault(room_of(name), []).append(name)
    rows = ["| room | files | lines | imports |", "|---|--:|--:|---|"]
    for room, names in rooms.items():
        package = room.partition(".")[0]
        others = {room_of(other) for name in names for other in imports()[name]} - {room}
        near = sorted(other.removeprefix(f"{package}.") for other in others if other.startswith(f"{package}."))
        far = sorted({other.partition(".")[0] for other in others} - {package})
        rows.append(f"| {room} | {len(names)} | {sum(map(lines_of, names))} | {', '.join([*near, *far])} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())  # noqa: T201
    print(f"\ncircles: {len(circles())}, imports of a later room: {len(upward())}")  # noqa: T201
