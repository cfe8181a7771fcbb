"""Code that only a store names is not executed."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_origin

import pytest
from typer.testing import CliRunner

from flowmill.configs.base import Section
from flowmill.configs.errors import TrustError
from flowmill.configs.load import override_config
from flowmill.configs.registry import Table, option_names, resolve
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.flows import process_state
from flowmill.flows.cli import app
from flowmill.flows.cli.track import track_command
from flowmill.flows.requests import PipelineRequest
from flowmill.models.engines import ENGINES
from flowmill.models.maths import KERNELS, PLANS, SOLVERS
from flowmill.models.quickstart import BUILDERS
from flowmill.models.rewards import REWARDS
from flowmill.storage.layout import ArtifactRef
from flowmill.store_reader import Store
from flowmill.tasks.advantages.estimators import ESTIMATORS
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from flowmill.tasks.execution.launchers import LAUNCHERS
from flowmill.tasks.execution.runners import RUNNERS
from flowmill.tasks.inputs.components import algorithm_needs
from flowmill.tasks.inputs.store_trust import HARMLESS, carried_out, check_trusted, pattern, remember
from flowmill.tasks.runs.opening import begin_run, open_run, recorded
from tests.conftest import ROOT, ConfigFactory, FlowmillCommand
from tests.support.settings import and_inside, is_section, section_fields

OWN = """
import os
from pathlib import Path

from flowmill.tasks.algorithms.flow_dppo import FlowDPPO

Path(os.environ["WITNESS"]).touch()

class Loss(FlowDPPO):
    "Needs what rollouts only store where they are asked for it."

def brightness(media, prompts, metadata):
    return [float(image.mean()) for image in media]
"""
REWARD = "rewards=[{name: 'own_reward_under_test:brightness', label: bright}]"
ALGORITHM = "optimize.algorithm={name: 'own_reward_under_test:Loss'}"
READING = (
    ("status",),
    ("status", "small"),
    ("status", "small", "--why", "advantage@1"),
    ("store", "ls"),
    ("store", "verify", "--deep"),
    ("store", "gc"),
    ("store", "export", "small", "EXPORTED"),
    ("store", "cp", "small", "COPIED"),
    ("store", "digest", "small"),
    ("diff", "small", "small"),
    ("report", "small", "--out", "REPORT"),
)


@pytest.mark.slow
def test_a_stranger_s_store_is_read_without_running_its_code(
    flowmill: FlowmillCommand, config_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "own_reward_under_test.py").write_text(OWN)
    witness, path = tmp_path / "witness", f"{tmp_path}:{ROOT}"
    here = {"PYTHONPATH": path, "WITNESS": str(witness)}
    elsewhere = {**here, "XDG_STATE_HOME": str(tmp_path / "other-machine")}
    root = ("--root", str(tmp_path / "store"))
    made = flowmill("run", str(config_file), "--set", REWARD, "--set", ALGORITHM, "--set", "run.epochs=1", **here)
    assert made.returncode == 0, made.stderr
    assert witness.exists()
    witness.unlink()
    for command in READING:
        words = [str(tmp_path / word) if word in ("EXPORTED", "COPIED", "REPORT") else word for word in command]
        found = flowmill(*words, *root, **elsewhere)
        assert found.returncode == 0, (command, found.stderr)
        assert not witness.exists(), command
    score = ("stage", "score", "--run", "small", "--epoch", "1", *root)
    refused = flowmill(*score, **elsewhere)
    assert refused.returncode == 1
    assert "rewards.0: own_reward_under_test:brightness" in refused.stderr
    assert "optimize.algorithm: own_reward_under_test:Loss" in refused.stderr
    assert "--trust-store" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not witness.exists(), "refused before it was imported"
    assert flowmill(*score, "--force", "--trust-store", **elsewhere).returncode == 0
    assert witness.exists()
    assert flowmill(*score, "--force", **elsewhere).returncode == 1, "trusted once is not trusted for good"
    assert flowmill(*score, "--force", **here).returncode == 0, "the config was given on this machine"


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.sampler={name: 'mine:Kernel'}",
        "optimize.algorithm={name: 'mine:Loss'}",
        "monitors=[{name: 'mine:watched'}]",
        "evaluate.judges=[{name: 'mine:judged'}]",
        "model.policy='mine:Family'",
        "execution.launcher={name: agents, options: {endpoint: 'n:1', prefixes: [[touch, x]]}}",
        "execution.runner={name: dask, options: {cluster_class: os.system}}",
        "tracking.uri=sqlite:////tmp/mine:db",
        "rewards=[{name: digits, server: 'http://mine:8600'}]",
    ],
)
def test_what_runs_code_or_commands_must_have_been_given_here(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    plain, stored = make_config(), make_config(setting)
    check_trusted(plain, plain, run="small")
    with pytest.raises(TrustError, match=r"no config given on this machine has named:\n  .*(mine:|touch|os\.system)"):
        check_trusted(stored, stored, run="small")
    # Given now, in place of what the store says or next to it.
    check_trusted(plain, stored, run="small")
    remember(stored)
    check_trusted(stored, stored, run="small")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "state").rglob("trusted")} == {0o700}
    assert len(set(carried_out(stored)) - set(carried_out(plain))) >= 1


def test_an_override_replaces_what_a_store_says(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = make_config("monitors=[{name: 'mine:watched'}]")
    begin_run(config)
    root = str(tmp_path / "store")
    with pytest.raises(TrustError, match=r"monitors\.0: mine:watched"):
        open_run(root, "small")
    open_run(root, "small", reads=True)
    open_run(root, "small", overrides=["monitors=[]"])
    open_run(root, "small", trusted=True)
    assert override_config(config, ["monitors=[]"]).monitors == ()


def test_what_an_algorithm_needs_is_read_from_the_run_or_not_at_all(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_loss_under_test.py").write_text(OWN)
    monkeypatch.setenv("WITNESS", str(tmp_path / "witness"))
    monkeypatch.syspath_prepend(tmp_path)
    begin_run(make_config(ALGORITHM.replace("own_reward", "own_loss")))
    monkeypatch.delitem(sys.modules, "own_loss_under_test")
    (tmp_path / "own_loss_under_test.py").unlink()
    root = str(tmp_path / "store")
    read = open_run(root, "small", reads=True).config
    assert algorithm_needs(read) == (True, False, 0, True, False, True)
    assert algorithm_needs(override_config(read, ["run.epochs=7"])) == (True, False, 0, True, False, True)
    assert algorithm_needs(override_config(read, ["optimize.algorithm=grpo"])) == (False, False, 0, False, False, True)
    shutil.rmtree(tmp_path / "store" / "runs" / "small" / "needs")
    with pytest.raises(TrustError, match=r"trains with 'own_loss_under_test:Loss'.*Start the run once more"):
        open_run(root, "small", reads=True)
    assert open_run(root, "small", reads=True, trusted=True).config.known_needs is None
    begin_run(make_config("run.name=other"))
    listed = CliRunner().invoke(app, ["status", "--root", root, "--json"])
    states = {run["run"]: run["state"] for run in json.loads(listed.output)}
    assert "cannot be read: Run 'small' trains with" in states["small"]
    assert states["other"] == "not started"
    other = open_run(root, "other", reads=True).config
    assert other.known_needs == (False, False, 0, False, False, True)
    # Earlier versions recorded the requirements of custom algorithms only; a built-in one is imported.
    shutil.rmtree(tmp_path / "store" / "runs" / "other" / "needs")
    earlier = open_run(root, "other", reads=True).config
    assert earlier.known_needs is None
    assert algorithm_needs(earlier) == other.known_needs


@pytest.mark.parametrize("setting", ["model.kind='mine:Kind'", "advantage.estimator={name: 'mine:Estimator'}"])
def test_what_reading_needs_code_for_must_have_been_given_here(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    begin_run(make_config(setting))
    with pytest.raises(TrustError, match="mine:"):
        open_run(str(tmp_path / "store"), "small", reads=True)
    open_run(str(tmp_path / "store"), "small", reads=True, trusted=True)


def test_every_command_that_opens_a_run_takes_the_consent_that_its_refusal_names(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [*(ROOT / "flows").rglob("*.py"), *(ROOT / "flowmill" / "explorer").glob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)]
    names = {"open_run": "trusted", "find_artifact": "trusted", "run": "trust_store"}
    called = [(getattr(call.func, "id", getattr(call.func, "attr", "")), call) for call in calls]
    opening = [
        (names[name], {each.arg for each in call.keywords})
        for name, call in called
        if name in names and (name != "run" or "flowmill.open" in ast.unparse(call))
    ]
    assert len(opening) > 15
    assert [keywords for name, keywords in opening if name not in keywords] == []
    (tmp_path / "own_estimator_under_test.py").write_text(
        "from flowmill.tasks.advantages.estimators import LeaveOneOut\n\nclass Mine(LeaveOneOut): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    begin_run(make_config("advantage.estimator={name: 'own_estimator_under_test:Mine'}"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    command = ["status", "small", "--root", str(tmp_path / "store")]
    assert isinstance(CliRunner().invoke(app, command).exception, TrustError)
    assert CliRunner().invoke(app, [*command, "--trust-store"], catch_exceptions=False).exit_code == 0


def test_a_config_that_is_run_is_remembered(
    make_config: ConfigFactory, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    given = process_state.configured(
        PipelineRequest(config=str(config_file), name="small", overrides=["monitors=[{name: 'mine:watched'}]"])
    )
    check_trusted(given, given, run="small")


def test_a_store_adds_no_folder_of_modules(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even to read it: a library that is not installed would be imported from there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, store, before = str(tmp_path / "planted"), str(tmp_path / "store"), [*sys.path]
    given = make_config(f"execution.modules=[{folder}]", f"tracking.uri={folder}")
    monkeypatch.setattr(sys, "path", before)
    begin_run(given)
    remember(given.model_copy(update={"execution": make_config().execution}))
    open_run(store, "small", reads=True)
    with pytest.raises(TrustError, match=r"execution\.modules: "):
        open_run(store, "small")
    assert folder not in sys.path, "nor if it was given as something else"
    remember(given)
    open_run(store, "small", reads=True)
    assert folder in sys.path


def test_nothing_is_sent_to_a_tracker_that_only_a_store_names(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    planted = tmp_path / "planted.db"
    # Code the store names besides is not carried out by tracking, so it is not asked about.
    begin_run(make_config(f"tracking.uri=sqlite:///{planted}", "monitors=[{name: 'mine:watched'}]"))
    with pytest.raises(TrustError, match=r"tracking\.uri: sqlite:///") as error:
        track_command("small", uri=None, root=str(tmp_path / "store"))
    assert "mine:watched" not in str(error.value)
    assert not planted.exists()


#: What the walk puts into a setting: a text no table has.
STRANGE = "strange:place"


def test_every_text_of_the_schema_is_harmless_or_wants_trust(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    plain = make_config()
    texts = [name for name, annotation in section_fields(RunConfig) if {str, Any} & set(and_inside(annotation))]
    assert len(texts) > 50
    open_to_all = []
    for setting in texts:
        remember(_with(plain, setting, "n"))
        stored = _with(plain, setting, STRANGE)
        if _refused(stored) is None:
            open_to_all.append(pattern(setting))
    assert set(open_to_all) == set(HARMLESS), "what is not covered is on the short list, and nothing on it is covered"


def _refused(stored: RunConfig) -> str | None:
    """Return the message with which a store's config is refused."""
    try:
        check_trusted(stored, stored, run="small")
    except TrustError as error:
        return str(error)
    return None


def _with(config: RunConfig, setting: str, text: str) -> RunConfig:
    """Return a config with a text in a setting, also where the schema refuses it."""
    head, *rest = setting.split(".")
    annotation = type(config).model_fields[head].annotation
    return config.model_copy(update={head: _placed(getattr(config, head), annotation, rest, text)})


def _blank(section: type[Section]) -> Section:
    """Return a section whose required settings all hold the same text."""
    return section.model_construct(**{name: "n" for name, field in section.model_fields.items() if field.is_required()})


def _placed(value: Any, annotation: Any, rest: list[str], text: str) -> Any:
    kinds = [each for each in and_inside(annotation) if is_section(each)]
    if not rest:
        holds = set(map(get_origin, and_inside(annotation)))
        return {"anything": text} if dict in holds else (text,) if tuple in holds else text
    if rest[0] == "*":
        return (_placed(value[0] if value else _blank(kinds[0]), kinds[0], rest[1:], text),)
    section = value if isinstance(value, Section) else _blank(kinds[0])
    return _with(section, ".".join(rest), text)


@pytest.mark.parametrize(
    "table",
    [REWARDS, ALGORITHMS, TOKEN_ALGORITHMS, ESTIMATORS, ENGINES, KERNELS, PLANS, SOLVERS, BUILDERS, RUNNERS, LAUNCHERS],
)
def test_every_option_of_every_component_with_a_text_wants_trust(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Table
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    plain = make_config()
    for name in table:
        component = resolve(table, name, label="component")
        for option in option_names(component):
            for value in (STRANGE, [STRANGE], {"deep": [{"er": STRANGE}]}):
                judge = RewardSection.model_construct(name=name, options={option: value})
                stored = plain.model_copy(update={"evaluate": plain.evaluate.model_copy(update={"judges": (judge,)})})
                with pytest.raises(TrustError, match=STRANGE):
                    check_trusted(stored, stored, run="small")


JUDGE = "evaluate.judges=[{{name: vlm_judge, options: {{model: m, endpoint: '{}', key_variable: {}}}}}]"

ENGINE = "rollout.tokens={{engine: {{name: openai, options: {{model: m, endpoint: '{}', key_variable: {}}}}}}}"


@pytest.mark.parametrize("asking", [JUDGE, ENGINE])
def test_no_key_goes_to_another_endpoint_than_the_one_it_was_given_for(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asking: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first, second = make_config(asking.format("http://a", "A_KEY")), make_config(asking.format("http://b", "B_KEY"))
    remember(first)
    remember(second)
    check_trusted(first, first, run="small")
    crossed = make_config(asking.format("http://a", "B_KEY"))
    with pytest.raises(TrustError, match="B_KEY"):
        check_trusted(crossed, crossed, run="small")


def test_an_override_of_one_option_vouches_for_no_other(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    stored = make_config(JUDGE.format("http://a", "A_KEY"))
    with pytest.raises(TrustError, match="http://a"):
        check_trusted(stored, override_config(stored, ["evaluate.judges.0.options.model=other"]), run="small")


def test_where_the_store_s_copies_are_is_nothing_a_record_says(make_config: ConfigFactory, tmp_path: Path) -> None:
    context = begin_run(make_config())
    context.run.add("configs", {**recorded(context.config), "store": {"cache": str(tmp_path / "elsewhere")}})
    assert open_run(context.store.root.uri, "small").config.store.cache is None


def test_a_reader_of_samples_that_only_a_manifest_names_is_not_imported(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_in_store.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    store = begin_run(make_config()).store
    ref = ArtifactRef("trajectories", "0" * 32)
    manifest = SimpleNamespace(options={"rollout": {"store": "only_in_store:Store"}})
    monkeypatch.setattr(type(store), "require", lambda store, ref: manifest)
    monkeypatch.setattr("flowmill.store_reader.find_artifact", lambda store, artifact: ref)
    for read in (Store(store).table, Store(store).images):
        with pytest.raises(TrustError, match="import 'only_in_store' first"):
            read(str(ref))
