"""Training from Python: arguments are settings, and functions of a script or notebook go where the run goes."""

from __future__ import annotations

import json as js
import linecache
import math
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import nbclient
import nbformat
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import flowmill
from flowmill.carried_source import carried_source, is_importable, module_name, user_folders
from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import hash_text
from flowmill.configs.import_paths import import_from
from flowmill.configs.load import load_config, override_config
from flowmill.configs.model_families import FAMILIES, family_of
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.flows import process_state
from flowmill.flows.requests import StageRequest
from flowmill.flows.run_in_process import call
from flowmill.models.policies import POLICIES
from flowmill.models.rewards import REWARDS
from flowmill.models.rewards.factory import make_reward, needs_of
from flowmill.run_display import as_html
from flowmill.tasks.inputs.option_paths import taken
from tests.conftest import ROOT

PUBLIC = [name for name in flowmill.__all__ if name[0].isupper()]


def script(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the globals of a script that is executed as ``__main__``."""
    file, main = tmp_path / "script.py", ModuleType("__main__")
    main.__file__ = str(file)
    file.write_text(textwrap.dedent(text) if text.startswith("\n") else text)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(file.read_text(), str(file), "exec"), vars(main))
    return vars(main)


def scores(thing: Any, source: str, **options: object) -> list[float]:
    """Return the scores of two images by a carried function or class."""
    reward = make_reward(carried(thing, source), options)
    images = np.stack([np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 100, np.uint8)])
    return [float(each) for each in reward.score(images, ["a", "b"], [{}, {"x": 1}])]  # type: ignore[union-attr]


def carried(thing: Any, source: str) -> str:
    """Return the import string of a carried function or class."""
    name = f"{thing.__name__}_{hash_text(source)}"
    import_from((), {name: source})
    return f"{name}:{thing.__name__}"


def test_a_function_is_carried_with_all_that_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = script(
        """
        import json as js
        import numpy as np
        from math import sqrt
        LEVELS = {"low": 10, "high": [1.5, None]}

        def half(images):
            return images.astype(float).mean((1, 2, 3)) / 2

        def reward(images: "Unknown", prompts: list[str], metadata):
            rows = [sqrt(each) for each in half(images)]
            return np.array(rows) + LEVELS["low"] + len(js.dumps(metadata[0])) - 2
        """,
        tmp_path,
        monkeypatch,
    )
    source = carried_source(names["reward"])
    monkeypatch.undo()
    assert scores(names["reward"], source) == [10.0, math.sqrt(50) + 10]


FORMS = {
    "classes that use each other": """
        class Base:
            def make(self):
                return Child()

        class Child(Base):
            value = 2.0

        def reward(media, prompts):
            return [Base().make().value for _ in prompts]
        """,
    "a call while a class is defined": """
        class Base:
            value = 3.0

            def early(self):
                return Early

        def value_of():
            return Base.value

        class Early:
            value = value_of()

        def reward(media, prompts):
            return [Early.value + Base().early().value for _ in prompts]
        """,
    "a decorator that uses a function which uses what it decorates": """
        def marked(function):
            function.mark = applied(3.0)
            return function

        def applied(value):
            return value * 2 if value < 9 else decorated()

        @marked
        def decorated():
            return 2.0

        def reward(media, prompts):
            return [applied(9) + decorated.mark for _ in prompts]
        """,
    "a class with an attribute of the name of what it holds": """
        scale = 2.0

        class Scaled:
            scale: float = scale
            both = scale + 1

        def reward(media, prompts):
            return [Scaled.scale + Scaled.both] * len(prompts)
        """,
    "attributes with the names of methods and variables": """
        from functools import lru_cache

        names = object()

        class Scaled:
            def scale(self):
                return 2.0

            @lru_cache
            def total(self):
                return self.scale * len(self.names)

            def least():
                return 1.0

            for width in (1, 2):
                pass
            try:
                best = best
            except NameError:
                best = 3.0
            scale = property(scale)
            total = lru_cache(total)
            least = staticmethod(least)
            width = width * 2
            names = [names.upper() for names in ("a", "b")]
            key = staticmethod(lambda key: key + 1)

        def reward(media, prompts):
            class Inner:
                width = 2.0
                width = width * 2

            made = Scaled()
            return [made.total(), made.least(), float(made.width), made.key(1), made.best, Inner.width]
        """,
    "an attribute of a class in a function that has the name of what it holds": """
        scale = 2.0

        def made():
            class Inner:
                scale = scale

            return Inner

        class Outer:
            inner = made()

        def reward(media, prompts):
            return [Outer.inner.scale] * len(prompts)
        """,
    "a class that the interpreter has built in": """
        from itertools import chain

        def reward(media, prompts):
            return [float(len(list(chain(each, each)))) for each in prompts]
        """,
    "a text of several lines, indented": """
        if True:
            def reward(media, prompts):
                '''Say what.

                It is a text.'''
                form = '''Answer:
                42
                '''
                return [float(len(form))] * len(prompts)
        """,
    "a text less indented than its function": """
        if True:
            def reward(media, prompts):
                form = '''
        Answer in one word.
        '''
                return [float(len(form))] * len(prompts)
        """,
    "a line of spaces in a text": "def reward(media, prompts):\n    return [float(len('''a\n   \n'''))] * 2\n",
    "a method after a form feed": """
        class Marked:
            marks = "\f\u2028"

            def value(self):
                return float(len(self.marks))

        def reward(media, prompts):
            return [Marked().value() for _ in prompts]
        """,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_carried_definition_does_what_it_does_in_its_script(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = script(FORMS[form], tmp_path, monkeypatch)["reward"]
    here, source = reward(None, ["ab", "c"]), carried_source(reward)
    monkeypatch.undo()
    module = import_module(carried(reward, source).partition(":")[0])
    assert module.reward(None, ["ab", "c"]) == here


def test_sources_that_runs_have_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their hash is part of the identity of a run's rewards."""
    names = script(
        """
        class Other:
            def base(self):
                return Base

        class Child(Other):
            value = 1

        class Base:
            def make(self):
                return Child()

        if True:
            def reward(media, prompts):
                '''Say what.

                It is a text.'''
                return [Base().make().value for _ in prompts]
        """,
        tmp_path,
        monkeypatch,
    )
    order = re.findall("^(?:class|def) (\\w+)", carried_source(names["reward"]), re.M)
    assert order == ["Other", "Child", "Base", "reward"]


def test_folders_of_modules_of_every_kind_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "lib"
    for name in ("lib/there.py", "lib_own/mine_alone.py", "one/mine_spread/a.py", "two/mine_spread/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(installed)})
    sys_path = [str(tmp_path / name) for name in ("lib", "lib_own", "one", "two")]
    monkeypatch.setattr(sys, "path", [*sys.path, *sys_path])
    assert "mine_alone" not in sys.modules, "a function imports it when it is called"
    assert user_folders(["there", "mine_alone", "mine_spread.a", "nowhere", "flowmill.x"]) == sys_path[1:]


def test_a_name_of_the_script_hides_one_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = script(
        """
        LOW, HIGH = float("-inf"), float("nan")

        def sum(values):
            return len(values) if LOW < 0 and HIGH != HIGH else 0

        def reward(images, prompts):
            return [sum(images)] * 2
        """,
        tmp_path,
        monkeypatch,
    )
    source = carried_source(names["reward"])
    monkeypatch.undo()
    assert scores(names["reward"], source) == [2.0, 2.0]


def test_options_of_a_script_have_their_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a module: wrong values are refused, files count by content, and class variables are no options."""
    names = script(
        """
        from dataclasses import dataclass
        from typing import ClassVar, Literal
        from flowmill.configs.path_types import FilePlace

        def weighted(media, prompts, *, curve: FilePlace, how: "Literal['mean', 'max']" = "mean", other: "No" = 0):
            return [1.0] * len(prompts)

        @dataclass
        class Levels:
            levels: ClassVar[dict] = {"a": 2.0}
            how: Literal["mean", "max"] = "mean"

            def score(self, media, prompts, metadata):
                return [self.levels["a"]] * len(prompts)
        """,
        tmp_path,
        monkeypatch,
    )
    sources = {name: carried_source(names[name]) for name in ("weighted", "Levels")}
    monkeypatch.undo()
    for name, options in (("weighted", {"curve": "c.txt"}), ("Levels", {})):
        assert scores(names[name], sources[name], **options)
        with pytest.raises(ConfigError, match="how is 'mena'; it must be 'mean' or 'max'"):
            scores(names[name], sources[name], **options, how="mena")
    with pytest.raises(ConfigError, match="has no option 'levels'"):
        scores(names["Levels"], sources["Levels"], levels={})
    found = taken(carried(names["weighted"], sources["weighted"]), REWARDS)
    assert found is not None
    assert found["curve"] == "FilePlace"


TYPES = """
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Mapping
from pydantic import PositiveInt

lock = threading.Lock()
Mode = Literal["mean", "max"]

class Client:
    lock = lock

@dataclass
class Row:
    lock: Any = lock

def reward(media, prompts, metadata: Mapping[str, Row], *, client: Client | None = None, how: Mode = "mean",
           count: PositiveInt = 1, file: Path | None = None, rows: "list[Row]" = ()):
    return [1.0] * len(prompts)
"""


@pytest.mark.parametrize("is_notebook", [False, True])
def test_types_are_carried_as_far_as_source_can(
    is_notebook: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alias has no name of its own; a class may need what source cannot carry, and is no reason to fail."""
    names = script(TYPES, tmp_path, monkeypatch)
    if is_notebook:
        names["In"] = ["%matplotlib inline", *TYPES.split("\n\n")]
        del names["__file__"]
    source = carried_source(names["reward"])
    monkeypatch.undo()
    assert scores(names["reward"], source, client=3, rows=2) == [1.0, 1.0]
    for wrong in ({"how": "mena"}, {"count": -1}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is "):
            scores(names["reward"], source, **wrong)


ALIASES = """
from collections.abc import Callable
from typing import Annotated, Literal, NewType, Optional, TypeVar

class Above:
    pass

T = TypeVar("T")
Name = NewType("Name", str)
LEAST = Above()
TABLE = {"mean": print}
gone = "a"
Items, Names = list[T], list[Name]
Words = list[T]
Ids = list[Name]
Weight = Annotated[float, LEAST]
Method = Literal[tuple(TABLE)]
Old = Literal[gone]
Size = int | float
Size = Optional[Size]
B = int
A = Callable[[], B]
B = dict[str, A]
Mode = Literal["mean", "max"]
Modes = list[Mode]
del gone

def reward(media, prompts, metadata, *, items: Items = (), words: Words = (), ids: Ids = (), weight: Weight = 1.0,
           method: Method = "mean", old: Old = "a", size: Size = None, a: A = None, b: B = None, modes: Modes = ()):
    return [1.0] * len(prompts)
"""


def test_aliases_of_what_source_cannot_carry_leave_options_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of what it can carry are checked."""
    names = script(ALIASES, tmp_path, monkeypatch)
    source = carried_source(names["reward"])
    monkeypatch.undo()
    free = ("items", "words", "ids", "weight", "method", "old", "size", "a", "b")
    assert scores(names["reward"], source, **{each: {"any": 1} for each in free}) == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"modes\.0 is 'mena'"):
        scores(names["reward"], source, modes=["mena"])


def test_types_and_submodules_do_not_change_the_name_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is part of the identity of a run's rewards, and runs of earlier versions carried none. Order counts too."""
    imports = (
        "import xml.dom.minidom\nfrom enum import Enum\nfrom pathlib import Path\nfrom typing import Any, Literal\n"
    )
    types = "class Kind(Enum):\n    A = 'a'\n\nMode = Literal['a', 'b']\n"
    base = "class Base:\n    folder: Path | None = None\n"
    text = (
        "def reward(media, prompts, metadata: Any, *, mode: Mode = 'a', kind: Kind | None = None):\n"
        "    return [Base.folder is None and Path(xml.dom.minidom.__name__).name]\n"
    )
    reward = script(f"{imports}{types}{base}{text}", tmp_path, monkeypatch)["reward"]
    lines = carried_source(reward).splitlines()
    imported = "from pathlib import Path as Path\nimport xml as xml\n"
    before = f"from __future__ import annotations\n{base}{imported}{text}"
    assert lines[1:3] == ['__import__("xml.dom")', '__import__("xml.dom.minidom")']
    assert {"Mode = Literal['a', 'b']", "class Kind(Enum):"} <= {*lines} - {*before.splitlines()}
    assert module_name(reward) == f"reward_{hash_text(before)}"


@pytest.mark.parametrize(
    ("text", "is_other"),
    [
        ("def reward(media, prompts, metadata, mode: Mode = 'a'):\n    return [1.0]", False),
        ("class Row(BaseModel):\n    mode: Mode\ndef reward(media, prompts):\n    return [Row(mode='a').mode]", True),
        (
            "@dataclass\nclass Part:\n    mode: Mode\nclass Row(BaseModel):\n    part: Part\n"
            "def reward(media, prompts):\n    return [Row(part={'mode': 'a'}).part]",
            True,
        ),
        (
            "@dataclass\nclass Part:\n    mode: Mode\ndef reward(media, prompts):\n    return [TypeAdapter(Part)]",
            True,
        ),
        ("@dataclass\nclass Part:\n    mode: Mode\ndef reward(media, prompts):\n    return [Part('a').mode]", False),
        ("class Row:\n    size = size\ndef reward(media, prompts):\n    return [Row.size]", True),
    ],
    ids=[
        "a type of an option",
        "a type of a model",
        "of a part of a model",
        "of what is converted",
        "of a part",
        "an attribute of the name of what it holds",
    ],
)
def test_the_name_of_a_module_counts_what_its_work_depends_on(
    text: str, is_other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    for size in (1, 2):
        own = (
            "from dataclasses import dataclass\nfrom typing import Literal\n"
            f"from pydantic import BaseModel, TypeAdapter\nMode = Literal['a', {size}]\nsize = {size}\n"
        )
        names.add(module_name(script(own + text, tmp_path, monkeypatch)["reward"]))
        linecache.clearcache()
    assert len(names) == 1 + is_other


def test_a_module_is_made_again_from_another_source() -> None:
    """A type that a notebook has changed holds at once, though it does not change the name of the module."""
    for value in (1, 2, 2):
        import_from((), {"made_again": f"VALUE, MADE = {value}, object()"})
        made = import_module("made_again")
        assert value == made.VALUE
    import_from((), {"made_again": "VALUE, MADE = 2, object()"})
    assert import_module("made_again") is made


def test_submodules_that_a_script_imports_are_there_in_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = script(
        """
        import xml.dom.minidom
        import os.path

        def reward(images, prompts):
            return [len(xml.dom.minidom.parseString("<a/>").childNodes)] * len(os.path.join("a"))
        """,
        tmp_path,
        monkeypatch,
    )
    source = carried_source(names["reward"])
    monkeypatch.undo()
    command = [sys.executable, "-I", "-c", f"{source}print(reward([], []))"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[1]\n"


def test_a_source_is_equal_in_all_processes(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("LIMIT = 3")
    (tmp_path / "script.py").write_text(
        "import helper\n"
        "from flowmill.carried_source import carried_source, imported_modules, user_folders\n"
        "WORDS = {'red', 'green', 'blue', 'cyan'}\n"
        "def reward(images, prompts):\n    return [helper.LIMIT in WORDS for _ in images]\n"
        "source = carried_source(reward)\n"
        "print(source, user_folders(imported_modules(source)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = {
        subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1
    assert printed.pop().rstrip().endswith(f"['{tmp_path}']"), "the folder of a module that is not installed"


def test_a_class_keeps_its_options_and_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = script(
        """
        from flowmill.models.rewards.base import declare

        class Base:
            scale = 2.0

        @declare(columns=("answer",))
        class Bright(Base):
            def __init__(self, bias=0.0):
                self.bias = bias

            def score(self, media, prompts, metadata):
                return media.reshape(len(media), -1).mean(1) * self.scale + self.bias
        """,
        tmp_path,
        monkeypatch,
    )
    source = carried_source(names["Bright"])
    monkeypatch.undo()
    assert scores(names["Bright"], source, bias=3) == [3.0, 203.0]
    assert needs_of(carried(names["Bright"], source), {}).columns == ("answer",)
    with pytest.raises(ConfigError, match="has no option 'bas'"):
        scores(names["Bright"], source, bas=3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "def make(k):\n    def reward(a, b):\n        return k\n    return reward\nreward = make(1)",
            "uses k of the function",
        ),
        ("reward = lambda a, b: a", "has no name of its own"),
        ("model = object()\ndef reward(a, b):\n    return model", "global 'model', of type object"),
        ("def reward(a, b):\n    return nowhere(a)", "uses 'nowhere', which is not defined"),
        ("def inner(a):\n    return lost\ndef reward(a, b):\n    return inner(a)", "uses 'lost'"),
    ],
)
def test_a_reward_that_cannot_be_carried_is_refused(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=reason):
        carried_source(script(text, tmp_path, monkeypatch)["reward"])


def test_functions_of_modules_are_imported_and_those_of_scripts_are_not() -> None:
    assert is_importable(load_config)
    assert not is_importable(type("Here", (), {"__module__": "__main__"}))


def test_every_pipeline_of_a_family_is_known(tmp_path: Path) -> None:
    classes = {name: getattr(resolve(POLICIES, name, label="policy"), "pipeline_name", None) for name in POLICIES}
    assert classes == {name: spec.pipeline for name, spec in FAMILIES.items()}
    for pipeline in {spec.pipeline for spec in FAMILIES.values() if spec.pipeline}:
        families = [name for name, spec in FAMILIES.items() if spec.pipeline == pipeline]
        (tmp_path / "model_index.json").write_text(js.dumps({"_class_name": pipeline}))
        if len(families) == 1:
            assert family_of(str(tmp_path)) == families[0]
        else:
            with pytest.raises(ConfigError, match=rf"set model\.policy to one of {families[0]}"):
                family_of(str(tmp_path))


def test_a_folder_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.path 'nowhere' is no folder here, so its model family is unknown"):
        flowmill.Model(path="nowhere")


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "causal_lm"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "vision_lm"),
        ({"architectures": ["JanusForConditionalGeneration"]}, "janus"),
    ],
)
def test_folders_of_transformers_are_known(config: dict[str, Any], family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(js.dumps(config))
    assert family_of(str(tmp_path)) == family


def test_a_folder_of_no_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no index of diffusers.*set model\.policy to its model family"):
        flowmill.Model(path=str(tmp_path))
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        flowmill.Model(path=str(tmp_path))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ("FlowmillError", "Run", "Store")])
def test_every_section_is_made_with_the_messages_of_the_schema(name: str) -> None:
    with pytest.raises(flowmill.FlowmillError, match=rf"flowmill\.{name}: unknown setting 'nosuch'"):
        getattr(flowmill, name)(nosuch=1)


def test_a_config_converts_both_ways(tmp_path: Path) -> None:
    config = load_config("tiny_sd3", ["run.epochs=3"])
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs of runs to start, which end there."""
    configs: list[RunConfig] = []

    def check(config: RunConfig, *, rewards: bool) -> None:
        configs.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr("flowmill.tasks.checks.check.check_config", check)
    monkeypatch.delenv("FLOWMILL_ROOT", raising=False)
    return configs


@pytest.mark.parametrize(
    ("preset", "override"),
    [
        ("tiny_sd3", "run.epochs=7"),
        *(("tiny_sd3", f"optimize.algorithm={name}") for name in ("nft", "refl", "grpo")),
        *(("addition_grpo", f"optimize.algorithm={name}") for name in ("ppo", "reinforce_plus_plus")),
        ("addition_ppo", "optimize.algorithm=grpo"),
        ("tiny_sd3", "prompts.train=mine.txt"),
        ("tiny_sd3", "prompts.heldout=~/mine.txt"),
        ("tiny_sd3", "prompts={sources: [{name: a, train: mine.txt, heldout: mine.txt}]}"),
        ("tiny_sd3", "execution.modules=[own]"),
        ("tiny_sd3", "rewards=[{name: 'mine:score'}]"),
    ],
)
def test_overrides_mean_the_same_from_python_as_on_the_command_line(
    preset: str, override: str, started: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine.txt", "mine.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    plain, expected = load_config(preset), load_config(preset, [override])
    for begin in (flowmill.train, flowmill.start):
        for config, overrides in ((preset, override), (plain, [override])):
            with pytest.raises(ConfigError, match="enough"):
                begin(config, overrides=overrides)
    assert started == [expected] * 4
    if not override.startswith("optimize"):
        # What follows from an algorithm is left to a stage: it works on rollouts that exist.
        staged = override_config(plain, StageRequest(run="a", overrides=[override]).overrides)
        assert staged.model_dump(exclude={"execution"}) == expected.model_dump(exclude={"execution"})
        assert override.startswith("rewards") or staged.execution == expected.execution


def test_an_algorithm_brings_its_plan_to_a_config_that_is_made(started: list[RunConfig]) -> None:
    with pytest.raises(ConfigError, match="enough"):
        flowmill.train(load_config("tiny_sd3"), algorithm="nft")
    assert started[0].rollout.plan.name == "final"
    with pytest.raises(ConfigError, match="enough"):
        flowmill.start(load_config("tiny_sd3", ["rollout.plan=late"]), overrides=["optimize.algorithm=nft"])
    assert started[1].rollout.plan.name == "late", "a choice of the config stays"


def test_arguments_may_be_paths(started: list[RunConfig], tmp_path: Path) -> None:
    places = {"model": tmp_path, "prompts": tmp_path / "mine.txt", "root": tmp_path / "store"}
    for settings in ({key: str(value) for key, value in places.items()}, places):
        with pytest.raises(ConfigError, match="enough"):
            flowmill.train("tiny_sd3", **settings, overrides=["model.build=null"])
    assert started[0] == started[1]
    with pytest.raises(ConfigError, match="enough"):
        flowmill.start("tiny_sd3", root=places["root"])
    assert started[2].store.root == str(places["root"])
    (tmp_path / "store" / "runs").mkdir(parents=True)
    assert flowmill.open(places["root"]).root == flowmill.open(str(places["root"])).root


def test_prompts_are_texts_in_an_order(started: list[RunConfig]) -> None:
    for prompts in (["a", "b"], (each for each in "ab"), {"a": 1, "b": 2}.keys(), np.array(["a", "b"])):
        with pytest.raises(ConfigError, match="enough"):
            flowmill.train("tiny_sd3", prompts=prompts)
    assert {each.prompts.train for each in started} == {("a", "b")}
    for wrong, said in (({"a"}, "a set has another order in each process"), (3, "prompts")):
        with pytest.raises(ConfigError, match=said):
            flowmill.train("tiny_sd3", prompts=wrong)


@pytest.mark.parametrize("config", [{"run": {"epochs": 1}}, 3, ["digits"]])
def test_what_is_no_config_is_named(config: Any) -> None:
    for begin in (flowmill.train, flowmill.start):
        with pytest.raises(ConfigError, match=f"config: a {type(config).__name__} is neither the name of a preset"):
            begin(config)


@pytest.mark.parametrize("terminal", [True, False])
def test_messages_of_a_run_are_seen_wherever_output_goes(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(request: object, *, return_state: bool) -> None:
        process_state.reporter().progress("pipeline", 1, 1, 1)
        process_state.reporter().message("warning: epoch 1")

    for name, stand_in in (("outcome", lambda state: state), ("on_server", nullcontext), ("_server", lambda: None)):
        monkeypatch.setattr(f"flowmill.flows.run_in_process.{name}", stand_in)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    call(work, StageRequest(run="a"))
    output = capsys.readouterr()
    shown, other = (output.out, output.err) if terminal else (output.err, output.out)
    assert "warning: epoch 1" in shown
    assert terminal or "epoch 1/1" not in shown, "no progress in a log"
    assert not other


@pytest.mark.parametrize(("section", "change"), [("optimize", {"algorithm": "grpo"}), ("run", {"epochs": 1})])
def test_a_section_may_be_absent_and_is_no_value(
    section: str, change: dict[str, Any], started: list[RunConfig]
) -> None:
    for wrong in ("nft", ["nft"], 3):
        with pytest.raises(ConfigError, match=rf"{section}: .* is no section. Give a mapping"):
            flowmill.train("tiny_sd3", **change, **{section: wrong})
    with pytest.raises(ConfigError, match=r"execution: 3 is no section"):
        flowmill.train("tiny_sd3", execution=3, rewards=load_config)
    with pytest.raises(ConfigError, match="enough"):
        flowmill.train("tiny_sd3", **change, **{section: None})
    with pytest.raises(ConfigError, match="enough"):
        flowmill.train("tiny_sd3", **change)
    assert started[0] == started[1]


@pytest.mark.parametrize("formats", [["", ""], ["png", ""], ["png", "png"]])
def test_a_notebook_shows_samples_with_and_without_media(formats: list[str]) -> None:
    rows = [{"sample_id": f"{each}", "prompt": "a", "media_format": form} for each, form in enumerate(formats)]

    def images(epoch: int, samples: list[str], *, evaluation: bool) -> dict[str, Image.Image]:
        assert all(formats[int(each)] for each in samples), "it has no media"
        return {each: Image.new("RGB", (2, 2)) for each in samples}

    figures = [{"figure": "mean", "list": "heldout", "reward": "r", "epoch": 1, "value": 0.5}]
    shown: Any = SimpleNamespace(name="n", epochs=[1], evaluations=[0, 1], images=images)
    shown.figures, shown.evaluation = lambda: pa.Table.from_pylist(figures), lambda epoch: pa.Table.from_pylist(rows)
    html = as_html(shown)
    assert (html.count("data:image/png"), html.count("<td>-</td>")) == (2 * formats.count("png"), 2 * formats.count(""))


_SCRIPT = """
import flowmill

SCALE = 255

def redness(images, prompts):
    return (images[..., 0].astype(float) - images[..., 1:].mean(-1)).mean((1, 2)) / SCALE

if __name__ == "__main__":
    settings = dict(prompts=["a red square", "a blue circle"], rewards=[redness, "jpeg_compressibility"])
    rollout = flowmill.Rollout(prompts_per_epoch=2, group_size=4, steps=2)
    execution = flowmill.Execution(score_workers=2, processes=2)
    run = flowmill.train("tiny_sd3", **settings, rollout=rollout, execution=execution, epochs=1, root="store")
    again = flowmill.train("tiny_sd3", **settings, rollout=rollout, execution=execution, epochs=1, root="store")
    first, second = (each.lineage().to_pylist() for each in (run, again))
    assert first == second
    assert run.config.rewards[0].name.startswith("redness_")
    print(run.name, run.config.rewards[0].slot, len(run.rewards(1, "redness")), run.report().name)
    print("data:image/png" in run._repr_html_())
"""


@pytest.mark.campaign
def test_a_script_trains_with_its_own_function_on_two_ranks(tmp_path: Path, prefect_server: str) -> None:
    (tmp_path / "my_script.py").write_text(_SCRIPT)
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "my_script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["tiny_sd3 redness 8 tiny_sd3-report.html", "True"]


@pytest.mark.campaign
@pytest.mark.slow
def test_a_notebook_trains_with_a_reward_of_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [
        "import flowmill\n\ndef brightness(images, prompts):\n    return images.mean((1, 2, 3)) / 255",
        "run = flowmill.train('tiny_sd3', prompts=['one', 'two'], rewards=brightness, epochs=1, root='store',\n"
        "    rollout=flowmill.Rollout(prompts_per_epoch=2, group_size=4, steps=2))\nrun",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[1].outputs
    assert any("data:image/png" in each.get("data", {}).get("text/html", "") for each in outputs)
    assert "epoch 1/1" in str(outputs), "progress is shown"
