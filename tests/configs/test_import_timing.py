"""Imports are measured, and never visible."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import time
from pathlib import Path

import pytest

from configs.import_timing import measure_imports, seconds_of_imports
from tasks.runs.progress import Ledger


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that takes 0.2 s, and imports another that takes 0.1 s."""
    (tmp_path / "slow_outer.py").write_text("import time; time.sleep(0.2); import slow_inner")
    (tmp_path / "slow_inner.py").write_text("import time; time.sleep(0.1)")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("slow_outer", "slow_inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    measure_imports()
    return "slow_outer"


def test_only_the_outermost_import_counts_and_once(slow: str) -> None:
    before, begun = seconds_of_imports(), time.monotonic()
    module = importlib.import_module(slow)
    importlib.import_module(slow)
    assert 0.3 <= seconds_of_imports() - before <= time.monotonic() - begun, "the inner one is part of the outer"
    assert module.__loader__ is module.__spec__.loader
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert "sleep" in inspect.getsource(module)


def test_threads_count_for_themselves(slow: str) -> None:
    before = seconds_of_imports()
    thread = threading.Thread(target=importlib.import_module, args=(slow,))
    thread.start()
    thread.join()
    assert seconds_of_imports() == before


def test_a_module_that_fails_is_told_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_one.py").write_text("raise ValueError('mine')")
    monkeypatch.syspath_prepend(str(tmp_path))
    measure_imports()
    with pytest.raises(ValueError, match="mine"):
        importlib.import_module("broken_one")
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere_at_all'"):
        importlib.import_module("nowhere_at_all")


def test_imports_are_no_work_of_a_stage_but_start_up(slow: str) -> None:
    ledger = Ledger()
    before = ledger.startup()
    with ledger.work("base"):
        importlib.import_module(slow)
        time.sleep(0.05)
    passed = time.monotonic() - ledger.started
    assert 0.05 <= ledger.seconds("base") <= passed - 0.3
    assert ledger.busy() == ledger.seconds("base")
    assert ledger.startup() - before > 0.29
    assert ledger.overhead() <= time.monotonic() - ledger.started - 0.35
