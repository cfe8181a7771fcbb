"""Measures the code base: ``python -m tools.size`` prints lines by package, docs, and dialect words per 1,000 lines.

``--write`` puts the lines of every room into the tree of docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.conftest import ROOT
from tests.test_prose import HABITS, PACKAGES

_PAGE = ROOT / "docs" / "architecture.md"
#: A line of the page's tree: a package, or with an indent a room of it.
_ROOM = re.compile(r"^(?P<indent> {11})?(?P<name>\w+/) +(?:(?P<lines>[\d,]+)  )?(?P<text>.*)$", re.MULTILINE)
_PACKAGE, _NAME = 11, 14


def _files(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def _lines(files: Iterable[Path]) -> list[str]:
    return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def room_lines() -> dict[str, int]:
    """Return the lines of source by room, ``package`` or ``package/room``; those of a package are without its rooms."""
    counts: dict[str, int] = {}
    for package in PACKAGES:
        for file in _files(f"{package}/*.py"):
            room = "/".join(file.relative_to(ROOT).parts[:-1][:2])
            counts[room] = counts.get(room, 0) + len(_lines([file]))
    return counts


def documented_lines(page: str) -> dict[str, int]:
    """Return the lines by room that the tree of the page names; 0 where it names none."""
    return {room: int((line["lines"] or "0").replace(",", "")) for room, line in _tree(page)}


def with_lines(page: str, counts: Mapping[str, int]) -> str:
    """Return the page with the lines of every room in its tree."""
    for room, line in reversed([*_tree(page)]):
        if room in counts:
            text = f"{line['name']:<{_NAME if line['indent'] else _PACKAGE}}{counts[room]:>5,}  {line['text']}"
            page = page[: line.start("name")] + text + page[line.end() :]
    return page


def _tree(page: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield the rooms of the tree with their lines."""
    package = ""
    for line in _ROOM.finditer(page, 0, page.index("```", page.index("```") + 3)):
        package = package if line["indent"] else line["name"].rstrip("/")
        yield f"{package}/{line['name'].rstrip('/')}" if line["indent"] else package, line


def code_lines(text: str) -> int:
    """Return the lines of a file that hold code: no blank lines, comments or docstrings."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print the table, and write the lines of rooms where that is asked for."""
    if "--write" in sys.argv:
        _PAGE.write_text(with_lines(_PAGE.read_text(encoding="utf-8"), room_lines()), encoding="utf-8")
    rows = [(package, _files(f"{package}/*.py")) for package in PACKAGES]
    source = [file for _, files in rows for file in files]
    rows += [("source", source), ("tests", _files("tests/*.py")), ("tools", _files("tools/*.py", "tools/*.c*"))]
    table = [f"{'':10} {'files':>6} {'lines':>7} {'code':>7}"]
    for name, files in rows:
        code = sum(code_lines(file.read_text(encoding="utf-8")) for file in files if file.suffix == ".py")
        table.append(f"{name:10} {len(files):6} {len(_lines(files)):7} {code:7}")
    docs, lines = _files("docs/*.md"), _lines(source)
    table.append(f"{'docs':10} {len(docs):6} {len(_lines(docs)):7}")
    rate = 1000 * sum(bool(HABITS.search(line)) for line in lines) / len(lines)
    table.append(f"dialect words on {rate:.2f} of 1,000 source lines")
    sys.stdout.write("\n".join([*table, ""]))


if __name__ == "__main__":
    main()
