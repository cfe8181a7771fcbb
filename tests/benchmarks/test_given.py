"""Given samples of many rows: memory does not grow with them, and the benchmark measures what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.benchmarks import given


@pytest.mark.parametrize("form", given.FORMS)
def test_memory_does_not_grow_with_rows(form: str, tmp_path: Path) -> None:
    """Twenty times the rows would take 20 MiB more as lists of Python's; the cache of the temporary file has 16."""
    few, many = (given.write(form, tmp_path, rows) for rows in (3_000, 30_000))
    small, large = (given._in_process("reading", form, path) for path in (few, many))
    assert (small["rows"], large["rows"]) == (3_000, 30_000)
    assert large["mib"] < small["mib"] + 24, (small, large)
    assert large["ratio"] > 0


@pytest.mark.slow
def test_all_figures_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))
    lines = given.table([1_000]).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == [*given.FORMS, "stage ingest", "stream"]
