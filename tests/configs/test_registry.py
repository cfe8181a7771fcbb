"""Components that a config names are checked before they are called."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowmill.configs import registry
from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import Table, create, resolve
from flowmill.models.engines import ENGINES
from flowmill.models.maths import KERNELS, PLANS, SOLVERS
from flowmill.models.policies import POLICIES
from flowmill.models.quickstart import BUILDERS
from flowmill.models.rewards import BACKBONES, REWARDS
from flowmill.models.rewards.factory import check_reward, make_reward
from flowmill.storage.backends import ROOTS
from flowmill.storage.trajectories import TRAJECTORY_STORES
from flowmill.tasks.advantages.estimators import ESTIMATORS
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.choices import SAMPLERS
from flowmill.tasks.execution.launchers import LAUNCHERS
from flowmill.tasks.execution.runners import RUNNERS
from flowmill.tasks.specs.modalities import MODALITIES, MODALITY_SPECS
from flowmill.tasks.specs.stages import STAGES
from flowmill.tasks.training.optimizers import OPTIMIZERS
from tests.conftest import ConfigFactory
from tests.support.option_types import option_types, outside, stated

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
#: Tables that no setting of a component names, or whose entries are not called.
OTHERS = {
    "backbones": BACKBONES,
    "samplers": SAMPLERS,
    "stages": Table({spec.name: spec.stage for spec in STAGES.values()}, like="flowmill.tasks.stages.stage:Stage"),
    "modalities": MODALITY_SPECS,
    "kinds": MODALITIES,
}


@pytest.mark.parametrize(
    ("string", "own"), [("explorer.page:Reward", "explorer.page"), ("nowhere.explorer:Reward", None)]
)
def test_a_module_under_its_name_of_before_is_told_by_the_name_it_has(string: str, own: str | None) -> None:
    with pytest.raises(ConfigError, match="cannot be imported") as refused:
        resolve(REWARDS, string, label="reward")
    assert (f"flowmill's own is named 'flowmill.{own}'" in str(refused.value)) == (own is not None)


def test_a_module_of_ones_own_that_imports_one_of_before_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_before.py").write_text("from explorer.page import main\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"module 'explorer' .* own is named 'flowmill\.explorer'"):
        resolve(REWARDS, "imports_before:Reward", label="reward")


def test_an_error_of_ones_own_module_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_error.py").write_text("limit = missing + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"'raises_error' cannot be imported: NameError: name 'missing' is not"):
        resolve(REWARDS, "raises_error:Reward", label="reward")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("string", ["os:system", "os:environ", "subprocess:Popen", "pathlib:Path", "sys:path"])
def test_an_import_string_of_something_else_is_refused_before_it_is_called(name: str, string: str) -> None:
    with pytest.raises(ConfigError, match=rf"component '{string}' is .*; it must be a class with \w+.*, like '"):
        create(TABLES[name], string, {}, label="component")


@pytest.mark.parametrize("name", [*TABLES, *OTHERS])
def test_every_entry_is_what_ones_own_must_be(name: str) -> None:
    table = {**TABLES, **OTHERS}[name]
    for import_string in table.values():
        assert callable(resolve(table, import_string, label="component"))


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
    kernels = Table({}, like="flowmill.models.maths.transitions:Kernel")
    with pytest.raises(ConfigError, match=r"is the class Half; it must be a class with step, like"):
        resolve(kernels, "half_a_kernel:Half", label="rollout.sampler")
    del sys.modules["half_a_kernel"]


@pytest.mark.parametrize("name", TABLES)
def test_options_have_types_that_allow_their_defaults_and_refuse_values_outside(name: str) -> None:
    for kind, field, annotation in option_types(TABLES[name]):
        assert annotation is not Any, f"{kind}: {field.name}"
        if field.default is not dataclasses.MISSING:
            registry.check_options(kind, "x", {field.name: field.default}, label="component")
        if stated(annotation):
            for value in outside(annotation):
                with pytest.raises(ConfigError, match=f"component 'x': {field.name}"):
                    registry.check_options(kind, "x", {field.name: value}, label="component")


def test_numbers_of_families_are_above_0_but_those_that_0_turns_off() -> None:
    for kind, field, annotation in option_types(POLICIES):
        off = field.default == 0 or field.name in ("guidance_scale_2", "image_crf", "flow_shift")
        for value in (-3,) if off else (-3, 0):
            if (bounds := stated(annotation)) is not None and "|" not in bounds:
                with pytest.raises(ConfigError, match=f"component 'x': {field.name}"):
                    registry.check_options(kind, "x", {field.name: value}, label="component")


OWN = """
from __future__ import annotations
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal
from pydantic import Field, PositiveInt
if TYPE_CHECKING:
    from nowhere import Unknown

@dataclass
class Fields:
    mode: Literal["fast", "slow"] = "fast"
    count: Annotated[PositiveInt, "Remove it for none."] | None = None
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    range: tuple[float, float] = (0, 1)
    names: tuple[str, ...] = ()
    label: str | int = ""
    limits: float | list[float] = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    other: Unknown = None
    _made: Unknown = field(init=False, default=None)
    def score(self, media, prompts, metadata): ...

class Plain:
    def __init__(self, count: PositiveInt = 1, free=None): ...
    def score(self, media, prompts, metadata): ...

def function(media, prompts, metadata, *, count: PositiveInt = 1, **more): ...
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_options.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_options", None)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Fields", {"mode": "medium"}, "mode is 'medium'; it must be 'fast' or 'slow'."),
        ("Fields", {"count": 0}, "count is 0; it must be greater than 0. Remove it for none."),
        ("Fields", {"count": True}, "count is True; it must be a valid integer."),
        ("Fields", {"share": 1.5}, "share is 1.5; it must be less than or equal to 1."),
        ("Fields", {"share": "0.5"}, "share is '0.5'; it must be a valid number."),
        ("Fields", {"share": float("nan")}, "share is nan; it must be a finite number."),
        ("Fields", {"range": [1]}, "range is [1]; it has too few entries."),
        ("Fields", {"range": (1, 2, 3)}, "range is [1, 2, 3]; it must have at most 2 items, not 3."),
        ("Fields", {"range": [0, "x"]}, "range.1 is 'x'; it must be a valid number."),
        ("Fields", {"names": "ab"}, "names is 'ab'; it must be a list like [a, b]."),
        ("Fields", {"limits": [1, "x"]}, "limits.1 is 'x'; it must be a valid number."),
        ("Fields", {"label": 2.5}, "label is 2.5; it must be a valid string or it must be a valid integer."),
        ("Fields", {"weights": {"a": "x"}}, "weights.a is 'x'; it must be a valid number."),
        ("Fields", {"_made": 1}, "has no option '_made'."),
        ("Plain", {"count": 0}, "count is 0; it must be greater than 0."),
        ("function", {"count": "x"}, "count is 'x'; it must be a valid integer."),
    ],
)
@pytest.mark.usefixtures("own")
def test_values_of_other_types_are_refused_also_of_own_components(
    name: str, options: dict[str, Any], said: str
) -> None:
    for check in (check_reward, make_reward):
        with pytest.raises(ConfigError, match=re.escape(said)):
            check(f"own_options:{name}", options)


@pytest.mark.usefixtures("own")
def test_allowed_values_are_passed_on_as_they_are() -> None:
    given = {"count": None, "share": 1, "range": [0, 1], "names": ["a"], "label": 3, "other": object()}
    made = create(REWARDS, "own_options:Fields", given, label="reward")
    for option, value in given.items():
        assert getattr(made, option) is value
    assert create(REWARDS, "own_options:Plain", {"count": 2, "free": object()}, label="reward")
    assert make_reward("own_options:function", {"count": 2, "further": "x"})
