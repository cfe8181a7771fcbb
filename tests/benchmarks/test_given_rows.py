"""Given samples of many rows: memory does not grow with them, and the benchmark runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.benchmarks import given_rows as given


@pytest.mark.campaign
@pytest.mark.parametrize("form", given.FORMS)
def test_memory_does_not_grow_with_rows(form: str, tmp_path: Path) -> None:
    """Rows of Python's values would take some 120 MiB, tarfile's members 50; the cache of the temporary file has 16."""
    found = given._in_process("reading", form, given.write(form, tmp_path, 60_000))
    assert found["rows"] == 60_000
    assert found["mib"] < 32, found
    assert found["ratio"] > 0


@pytest.mark.campaign
@pytest.mark.slow
def test_all_figures_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))
    lines = list(given.table([1_000]))
    assert [line.split("|")[2].strip() for line in lines[2:]] == [*given.FORMS, "stage ingest", "stream"]
