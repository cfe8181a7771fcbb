"""Files and repositories named by options are looked for before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from flowmill.configs import introspection, path_types
from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.flows.cli.check import check_command
from flowmill.models.rewards import ARGUMENTS, REWARDS
from flowmill.tasks.algorithms import ALGORITHMS
from flowmill.tasks.checks.names import check_names
from tests.conftest import ROOT

_PLACES = {name for name, value in vars(path_types).items() if value is str}


def placed() -> Iterator[tuple[str, str, str]]:
    """Yield setting, component and option of everything that names a place."""
    for setting, table in (("rewards.0", REWARDS), ("optimize.algorithm", ALGORITHMS)):
        for name, import_string in table.items():
            taken = introspection.options(import_string, skipped=len(ARGUMENTS) if table is REWARDS else 0) or {}
            for option, kind in taken.items():
                if any(place in kind for place in _PLACES):
                    yield setting, name, option


@pytest.mark.parametrize(("setting", "name", "option"), list(placed()))
@pytest.mark.parametrize("many", [False, True])
def test_what_is_not_there_is_refused(setting: str, name: str, option: str, many: bool) -> None:
    value = "{one: ./nowhere}" if many else "./nowhere"
    overrides = [f"{setting}={{name: {name}, options: {{{option}: {value}}}}}"]
    reason = rf"{option} './nowhere' is no (folder|file)\. .*the working directory|'./nowhere' names no fit"
    with pytest.raises(ConfigError, match=reason):
        check_names(load_config(ROOT / "configs" / "tiny_sd3.yaml", overrides))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.name=../x", "run.name '../x' must consist of letters"),
        ("store.root=gs://bucket/x", "store.root: the scheme 'gs' does not exist"),
    ],
)
def test_places_that_no_run_can_have_are_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_names(load_config("tiny_sd3", [override]), overrides=[override])
    assert str(error.value).startswith(f"--set {override}: {said}")


@pytest.mark.parametrize("model", ["openai/clip-vit-base-patch32", "gpt2", "."])
def test_a_folder_and_what_may_be_on_the_hub_are_not(model: str) -> None:
    check_names(
        load_config(
            ROOT / "configs" / "tiny_sd3.yaml", [f"rewards.0={{name: clip_score, options: {{model: {model}}}}}"]
        )
    )


def test_what_a_reward_inside_another_names_is_looked_for_and_what_a_server_reads_is_not() -> None:
    head = "{reward: aesthetic, options: {head: nowhere}}"
    for server in (False, True):
        reward = f"{{name: rank, options: {head}{', server: http://127.0.0.1:1' if server else ''}}}"
        with (
            nullcontext()
            if server
            else pytest.raises(ConfigError, match=r"options\.options\.head 'nowhere' is no file")
        ):
            check_names(load_config(ROOT / "configs" / "tiny_sd3.yaml", [f"rewards.0={reward}"]))


def test_a_near_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "head.safetensors").touch()
    overrides = ["rewards.0={name: aesthetic, options: {head: heat.safetensors}}"]
    with pytest.raises(ConfigError, match=r"is no file\. Did you mean 'head.safetensors'"):
        check_names(load_config(ROOT / "configs" / "tiny_sd3.yaml", overrides))


def test_every_option_that_is_said_to_be_a_folder_or_a_file_is_looked_for() -> None:
    label = r"(?:\w+ ){0,4}(?:[Ff]older|[Ff]ile)\b|.*``\w+\.(?:json|safetensors)``|\w+ copy of"
    said = re.compile(rf'^    (\w+): (.+?)(?: = .*)?\n    """(?={label})', re.MULTILINE)
    found = {
        (path.stem, option): kind
        for folder in ("models/rewards", "models/engines", "tasks/algorithms", "tasks/advantages")
        for path in sorted({*(ROOT / folder).glob("*.py")} - {ROOT / "models/rewards/weight_files.py"})
        for option, kind in said.findall(path.read_text())
    }
    assert found.keys() >= {("hpsv3", "weights"), ("opd", "teacher")}
    named = {("chains", "name")}  # not an option: the name of a folder of weights
    other = [where for where, kind in found.items() if not any(place in kind for place in _PLACES)]
    assert set(other) - named == set()


def test_what_a_config_takes_is_said_before_all_that_it_names_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    judges = [{"name": "aesthetic", "options": {"head": "nowhere"}}]
    mine = {"extends": str(ROOT / "configs" / "tiny_sd3.yaml"), "evaluate": {"judges": judges}}
    path.write_text(yaml.safe_dump(mine))
    with pytest.raises(ConfigError, match="head 'nowhere' is no file"):
        check_command(path, [], as_json=False, gpu_memory=None)
    printed = capsys.readouterr().out
    assert "optimizer updates" in printed
    assert "can run" not in printed
