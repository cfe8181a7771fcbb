"""What a config names is looked at before it is called."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.registry import Table, create, resolve
from models.engines import ENGINES
from models.maths import KERNELS, PLANS, SOLVERS
from models.policies import POLICIES
from models.quickstart import BUILDERS
from models.rewards import REWARDS
from storage.backends import ROOTS
from storage.trajectories import TRAJECTORY_STORES
from tasks.advantages.estimators import ESTIMATORS
from tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from tasks.checks.check import check_config
from tasks.execution.launchers import LAUNCHERS
from tasks.execution.runners import RUNNERS
from tasks.training.optimizers import OPTIMIZERS
from tests.conftest import ConfigFactory

TABLES = {
    "policies": POLICIES,
    "builders": BUILDERS,
    "rewards": REWARDS,
    "plans": PLANS,
    "solvers": SOLVERS,
    "kernels": KERNELS,
    "roots": ROOTS,
    "trajectory stores": TRAJECTORY_STORES,
    "algorithms": ALGORITHMS,
    "algorithms of language models": TOKEN_ALGORITHMS,
    "engines": ENGINES,
    "estimators": ESTIMATORS,
    "launchers": LAUNCHERS,
    "runners": RUNNERS,
    "optimizers": OPTIMIZERS,
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("string", ["os:system", "os:environ", "subprocess:Popen", "pathlib:Path", "sys:path"])
def test_an_import_string_of_something_else_is_refused_before_it_is_called(name: str, string: str) -> None:
    with pytest.raises(ConfigError, match=rf"component '{string}' is .*; it must be a class with \w+.*, like '"):
        create(TABLES[name], string, {}, label="component")


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_is_what_ones_own_must_be(name: str) -> None:
    for import_string in TABLES[name].values():
        assert resolve(TABLES[name], import_string, label="component")


@pytest.mark.parametrize(
    "setting",
    [
        "model.policy={!r}",
        "rollout.sampler={{name: {!r}, options: {{command: {}}}}}",
        "rollout.plan={{name: {!r}, options: {{command: {}}}}}",
        "rollout.solver={!r}",
        "rollout.store={!r}",
        "evaluate.solver={!r}",
        "optimize.optimizer={!r}",
        "optimize.algorithm={{name: {!r}, options: {{command: {}}}}}",
        "execution.launcher={{name: {!r}, options: {{command: {}}}}}",
        "execution.runner={{name: {!r}, options: {{command: {}}}}}",
        "rewards=[{{name: {!r}, options: {{command: {}}}}}]",
        "monitors=[{{name: {!r}, label: other, options: {{command: {}}}}}]",
        "evaluate.judges=[{{name: {!r}, label: other, options: {{command: {}}}}}]",
    ],
)
def test_a_command_in_a_config_is_not_carried_out(make_config: ConfigFactory, tmp_path: Path, setting: str) -> None:
    left = tmp_path / "carried-out"
    with pytest.raises(ConfigError, match="'os:system' is of type builtin_function_or_method"):
        check_config(make_config(setting.format("os:system", f"touch {left}")))
    assert not left.exists()
    assert os.system(f"touch {left}") == 0
    assert left.exists(), "the command would have been seen"


def test_a_class_that_lacks_a_method_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_kernel.py").write_text("class Half:\n    def draw(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernels = Table({}, like="models.maths.transitions:Kernel")
    with pytest.raises(ConfigError, match=r"is the class Half; it must be a class with step, like"):
        resolve(kernels, "half_a_kernel:Half", label="rollout.sampler")
    del sys.modules["half_a_kernel"]
