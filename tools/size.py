"""Measures the code base: ``python -m tools.size`` prints lines by package, docs, and dialect words per 1,000 lines."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.conftest import ROOT
from tests.test_prose import HABITS, PACKAGES


def _files(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def _lines(files: Iterable[Path]) -> list[str]:
    return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def code_lines(text: str) -> int:
    """Return the lines of a file that hold code: no blank lines, comments or docstrings."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text and node.end_lineno is not None:
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def main() -> None:
    """Print the table."""
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
