"""Code of a component cannot end the process without a message; a signal can."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowmill.configs.answers import json_of
from flowmill.configs.errors import ConfigError, FlowmillError, RewardError
from flowmill.configs.exits import StopSignal, is_interruption, uninterrupted, user_code, without_exits
from flowmill.configs.registry import Table, create
from flowmill.flows.cli.signals import terminable
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.differentiable import followed
from flowmill.models.rewards.invocation import Handling, score
from tests.conftest import ROOT


class Panic(BaseException):
    """An error of a library that is no Exception, as those of Rust are."""


#: What code of a component may raise while a command listens to signals.
ENDS = [SystemExit(3), SystemExit(0), SystemExit(130), SystemExit("usage: ..."), KeyboardInterrupt(), Panic("bug")]
by_end = pytest.mark.parametrize("end", ENDS, ids=repr)


@pytest.fixture
def listening() -> Iterator[None]:
    """Hear Ctrl-C as a program of the user does, which shells have their background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_an_interruption_waits_for_the_end_of_imports() -> None:
    steps = []

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("imported")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["imported"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="no module"), uninterrupted():
        raise ValueError("no module")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interruptible(node: ast.AST) -> Iterator[str]:
    """Yield the modules that functions import while Ctrl-C may end the import."""
    for each in ast.iter_child_nodes(node):
        is_safe = isinstance(each, ast.With) and "uninterrupted" in ast.unparse(each.items[0])
        is_import = isinstance(each, ast.ImportFrom) and not isinstance(node, ast.Module | ast.If)
        if is_import and str(each.module).startswith("flowmill."):  # type: ignore[attr-defined]
            yield str(each.module)  # type: ignore[attr-defined]
        elif not is_safe:
            yield from interruptible(each)


def test_the_python_api_imports_torch_uninterrupted() -> None:
    files = [ROOT / "tasks" / "reports" / "streams.py", *(ROOT / "flowmill").glob("*.py")]
    modules = sorted({name for file in files for name in interruptible(ast.parse(file.read_text()))})
    assert len(modules) > 5
    code = f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "prefect", "datasets"} & {*done.stdout.split()}


class Ending:
    """A reward that ends the process, for some prompts."""

    def __init__(self, end: BaseException, prompts: str = "abc") -> None:
        self._end, self._prompts = end, prompts

    def score(self, media: np.ndarray, prompts: list[str], metadata: Any) -> np.ndarray:
        if set(prompts) & set(self._prompts):
            raise self._end
        return np.ones(len(media), np.float32)

    def differentiable(self, media: torch.Tensor, prompts: list[str], metadata: Any) -> torch.Tensor:
        raise self._end


BATCH = Batch(media=np.zeros((3, 2, 2, 3), np.uint8), prompts=list("abc"), metadata=[{}] * 3)


@by_end
@pytest.mark.usefixtures("listening")
def test_a_reward_that_ends_the_process_is_named_with_its_sample(end: BaseException) -> None:
    with terminable():
        with pytest.raises(RewardError, match=rf"Reward 'mine' failed for prompt 'b'.*: {type(end).__name__}: "):
            score(Ending(end, "b"), "mine", BATCH)
        found = score(Ending(end, "b"), "mine", BATCH, Handling(exclude=True))
        assert np.isnan(found.values).tolist() == [False, True, False]
        with pytest.raises(RewardError, match=rf"gradient of reward 'mine' failed for .*: {type(end).__name__}: "):
            followed(Ending(end), "mine", torch.zeros(3, 3, 2, 2), BATCH)


@by_end
@pytest.mark.usefixtures("listening")
def test_any_other_code_that_ends_the_process_is_named_with_its_line(end: BaseException) -> None:
    here = rf"the work: '{__file__}', line \d+, raised {type(end).__name__}: .*without a message"
    with terminable(), pytest.raises(FlowmillError, match=here), without_exits("the work"):
        raise end


def test_an_error_of_user_code_is_told_from_one_of_flowmill() -> None:
    places: list[str | None] = []
    for fails in (lambda: {}["missing"], lambda: json.loads("{"), lambda: json_of(b"{")):
        try:
            fails()
        except (KeyError, ValueError) as error:
            places.append(user_code(error))
    own, of_library, of_flowmill = places
    assert re.fullmatch(rf"'{__file__}', line \d+,", str(own))
    assert re.fullmatch(rf"'{__file__}', line \d+,", str(of_library))
    assert of_flowmill is None


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_it_meets(number: int) -> None:
    class Meeting(Ending):
        def score(self, media: np.ndarray, prompts: list[str], metadata: Any) -> np.ndarray:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 10)
            return np.ones(len(media), np.float32)

    with pytest.raises(StopSignal) as stopped, terminable(), without_exits("the work"):
        score(Meeting(SystemExit(3)), "mine", BATCH, Handling(exclude=True))
    assert stopped.value.code == 128 + number


@pytest.mark.usefixtures("listening")
def test_ctrl_c_in_a_program_of_the_user_is_one() -> None:
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait([], 10)

    with pytest.raises(KeyboardInterrupt), without_exits("the work"):
        interrupted()
    found = []
    thread = threading.Thread(target=lambda: found.append(is_interruption(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert found == [False], "no signal comes to another thread"
    assert all(map(is_interruption, (StopSignal(130), GeneratorExit(), asyncio.CancelledError())))


@pytest.mark.usefixtures("listening")
def test_a_script_that_reads_arguments_is_named_not_the_library_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('x')\nparser.parse_args(['--y'])\n"
    (tmp_path / "borrowed_script.py").write_text(text)
    (tmp_path / "ending_class.py").write_text("class Made:\n    def __init__(self):\n        raise SystemExit(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    table = Table({}, like="tests.configs.test_exits:Ending", functions=True)
    with pytest.raises(ConfigError, match=r"reward 'borrowed_script:score': '.*borrowed_script.py', line 4, raised"):
        create(table, "borrowed_script:score", {}, label="reward")
    table = Table({"made": "ending_class:Made"}, like="")
    with pytest.raises(ConfigError, match=r"choice 'made': '.*ending_class.py', line 3, raised SystemExit: 2"):
        create(table, "made", {}, label="choice")


@pytest.mark.slow
def test_the_command_ends_with_one_message(tmp_path: Path) -> None:
    code = "import sys\ndef score(media, prompts, metadata):\n    sys.exit(0)\n"
    (tmp_path / "quits.py").write_text(code)
    command = [sys.executable, "-m", "flowmill.flows.cli", "check", "digits", "--set", "rewards=[quits:score]"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, "an exit with 0 is no success"
    assert done.stderr.startswith("flowmill: ")
    assert len(done.stderr.splitlines()) == 1
    assert "quits:score" in done.stderr
