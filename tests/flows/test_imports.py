"""A command imports no library that it does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowmill.tasks.runs.context import RunContext
from tests.conftest import ROOT
from tests.support.language_models import texts_data

pytestmark = pytest.mark.slow


def needlessly_loaded(folder: Path, command: str, code: str, needless: set[str]) -> str:
    """Run code with the arguments of a command; return which of these modules it imported."""
    script = (
        f"import sys\nsys.argv = ['flowmill', *{command.split()}]\nfrom flowmill.flows.cli import main\n"
        f"try:\n    {code}\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('\\nloaded', *sorted({needless} & {{*sys.modules}}))"
    )
    command_line = [sys.executable, "-c", script]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command_line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].removeprefix("loaded").strip()


@pytest.mark.parametrize(
    "command", ["status small", "status", "status --why optimize@1 small", "diff small small", "report small"]
)
def test_reading_a_run_imports_no_torch(finished_run: tuple[RunContext, Path], tmp_path: Path, command: str) -> None:
    command = f"{command} --root {finished_run[0].store.root.uri}"
    assert needlessly_loaded(tmp_path, command, "main()", {"torch"}) == ""


def test_the_p_value_of_a_fall_imports_neither_torch_nor_slow_statistics(tmp_path: Path) -> None:
    code = (
        "from flowmill.tasks.metrics.alerts import fall_by_chance\n"
        "    found = fall_by_chance({str(n): 1.0 for n in range(99)}, {str(n): n / 100 for n in range(99)})\n"
        "    assert 0 < found < 1e-9"
    )
    assert needlessly_loaded(tmp_path, "status", code, {"torch", "scipy.stats"}) == ""


@pytest.mark.parametrize(
    ("code", "needless"),
    [
        ("main()", {"diffusers", "transformers", "torch.distributed.tensor", "prefect", "mlflow"}),
        ("import flowmill.flows.pipeline", {"diffusers", "transformers", "mlflow"}),
    ],
)
def test_a_check_and_a_flow_import_no_library_of_later_work(tmp_path: Path, code: str, needless: set[str]) -> None:
    assert needlessly_loaded(tmp_path, "check digits", code, needless) == ""


def test_language_models_need_no_library_of_diffusion(tmp_path: Path) -> None:
    """Of all stages of a run; what a flow imports besides is above."""
    (tmp_path / "texts.yaml").write_text(json.dumps(texts_data(tmp_path)))
    code = (
        "from flowmill.configs.load import load_config\n"
        "    from flowmill.tasks.checks.check import check_config\n"
        "    from tests.support.inside import train\n"
        "    config = load_config('texts.yaml')\n"
        "    check_config(config)\n"
        "    train(config)"
    )
    assert needlessly_loaded(tmp_path, "run", code, {"diffusers"}) == ""
