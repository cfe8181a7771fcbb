"""The path from the command ``flowmill run`` to ``loss.backward()``: few calls in few files."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.conftest import ROOT
from tests.support.preloaded import run_forked

#: The packages whose calls count.
_OWN = ("configs", "storage", "models", "tasks", "flows")
#: Most calls and most files on the stack of a backward pass.
_CALLS, _FILES = 16, 9
#: The command line, which writes the stack of its backward passes into a file.
_TRACED = """
import json, sys, torch
from pathlib import Path

_, _, _, path, *arguments = sys.argv
backward = torch.Tensor.backward

def traced(*given, **options):
    frame, stack = sys._getframe(1), []
    while frame is not None:
        stack.append((str(Path(frame.f_code.co_filename).resolve()), frame.f_code.co_qualname))
        frame = frame.f_back
    Path(path).write_text(json.dumps(stack))
    return backward(*given, **options)

torch.Tensor.backward = traced
sys.argv = ["flowmill", *arguments]
from flowmill.flows.cli import main

main()
"""


def test_few_calls_lead_from_the_command_to_the_backward_pass(
    config_file: Path, tmp_path: Path, preloaded: str, prefect_server: str
) -> None:
    path, arguments = tmp_path / "stack.json", ["run", str(config_file), "--set", "run.epochs=1", "--quiet"]
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    command = ["-c", _TRACED, str(path), *arguments]
    done = run_forked(preloaded, command, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    rooms = {str(ROOT / name) for name in _OWN}
    own = [
        f"{Path(file).relative_to(ROOT)}: {name}"
        for file, name in reversed(json.loads(path.read_text()))
        if any(file.startswith(f"{room}{os.sep}") for room in rooms)
    ]
    files = {call.split(":")[0] for call in own}
    shown = "\n".join(own)
    assert own[0] == "flows/cli/__init__.py: main"
    assert own[-1].startswith("tasks/training/")
    assert len(own) <= _CALLS, shown
    assert len(files) <= _FILES, shown
