"""When garbage is looked for: not while a process starts, as usual once it works."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flowmill.configs import gc_tuning
from flowmill.flows.cli import run
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*thresholds)
    gc.enable() if enabled else gc.disable()


def test_nothing_is_looked_for_while_a_process_starts_and_what_is_there_is_left_out() -> None:
    class Cycle:
        pass

    frozen = gc.get_freeze_count()
    with gc_tuning.starting():
        assert not gc.isenabled()
        kept = [Cycle() for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("context", [gc_tuning.starting, gc_tuning.without_collecting])
def test_the_collector_is_left_as_it_was_found(context: object, enabled: bool) -> None:
    gc.enable() if enabled else gc.disable()
    with pytest.raises(KeyError), context():  # type: ignore[operator]
        raise KeyError
    assert gc.isenabled() is enabled


def test_a_flow_of_a_command_works_with_the_usual_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = gc.get_threshold()
    gc_tuning.collect_rarely()
    assert gc.get_threshold() == gc_tuning.RARELY != usual
    monkeypatch.setattr("flowmill.flows.run_in_process.outcome", lambda state: gc.get_threshold())
    monkeypatch.setattr("flowmill.flows.run_in_process.on_server", lambda api: gc_tuning.without_collecting())
    assert run.run_flow(lambda request, return_state: None, None, None) == usual  # type: ignore[arg-type]


@pytest.mark.parametrize(("rarely", "said"), [("", "collected\n"), ("collect_rarely()", "")])
def test_nothing_is_looked_for_at_the_end_of_a_command(rarely: str, said: str) -> None:
    code = (
        "import gc\nfrom flowmill.configs.gc_tuning import collect_rarely\ngc.disable()\n"
        "class Cycle:\n    def __del__(self): print('collected')\n"
        f"one = Cycle()\none.self = one\ndel one\n{rarely}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == said
