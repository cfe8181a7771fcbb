"""The meaning of 'next' and 'latest', and runs that grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowmill.configs.errors import ConfigError, NotCommittedError
from flowmill.configs.load import load_config
from flowmill.configs.presets import config_file, copy_preset, presets
from flowmill.flows.requests import StageRequest
from flowmill.storage.maintenance.garbage_collection import Retention, plan_removals
from flowmill.tasks.runs.epoch_count import length
from flowmill.tasks.runs.extension import advanced, chosen_epoch, extend, extend_for, grown
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.runs.start import started_from
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.stages import STAGES
from flowmill.tasks.tracking.client import open_client
from tests.conftest import ROOT, FlowmillCommand
from tests.support.inside import Make, prepare, run_epoch, run_stage


def test_gradients_have_the_epochs_that_all_rewards_have_them_of(make_config: Make) -> None:
    rewards = "rewards=[digits_network, {name: digits_network, label: again}]"
    context = prepare(make_config(rewards, "optimize.algorithm=reward_gradient", "rollout.plan=final"))
    run_stage(context, "rollout", 1)
    for slot, epoch in (("digits_network", 1), ("again", 2)):
        run_stage(context, "gradient", 1, slot)
        assert chosen_epoch(context, "gradient", "next") == epoch


def test_next_and_latest_follow_what_is_there(make_config: Make) -> None:
    context = prepare(make_config("run.epochs=1", "monitors=[{name: jpeg_incompressibility}]"))

    def chosen(asked: str) -> dict[str, int]:
        stages = ("policy", "rollout", "score", "advantage", "optimize", "evaluate", "export")
        return {stage: chosen_epoch(context, stage, asked) for stage in stages}  # type: ignore[arg-type]

    first = {"policy": 0, "rollout": 1, "score": 1, "advantage": 1, "optimize": 1, "evaluate": 0, "export": 0}
    assert chosen("next") == chosen("latest") == first
    run_stage(context, "rollout", 1)
    assert chosen("next") == {**first, "rollout": 2}
    run_stage(context, "score", 1, "jpeg_compressibility")
    assert chosen("next")["score"] == 1, "one of two rewards"
    run_stage(context, "score", 1, "jpeg_incompressibility")
    assert chosen("next") == {**first, "rollout": 2, "score": 2}
    for stage in ("advantage", "optimize"):
        run_stage(context, stage, 1)
    trained_once = {"evaluate": 1, "export": 1}
    assert chosen("latest") == {**first, **trained_once}
    assert chosen("next") == {
        "policy": 0,
        **dict.fromkeys(("rollout", "score", "advantage", "optimize"), 2),
        **trained_once,
    }
    assert chosen_epoch(context, "rollout", 7) == 7


def test_a_rewound_run_is_like_one_that_never_was_longer(make_config: Make) -> None:
    """Its later epochs are side results: no command chooses, continues or counts them."""
    context = prepare(make_config("run.epochs=3"))
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
    root, rewound = context.store.root.uri, begin_run(make_config("run.epochs=2"))
    rollouts = {epoch: str(rewound.chain.require(epoch, "rollout").ref) for epoch in (1, 2)}
    removals = [each.label for each in plan_removals(context.store, Retention(keep_epochs=1))]
    assert removals == [rollouts[1]]
    shorter = prepare(make_config("run.epochs=2", "run.name=shorter"))
    for epoch in (1, 2):
        run_epoch(shorter, epoch)

    def seen(name: str) -> list[object]:
        run = open_run(root, name, reads=True)
        chosen = [chosen_epoch(run, stage, asked) for stage in STAGES for asked in ("next", "latest")]  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as refused:
            started_from(run.store, make_config(f"model.start={name}@9", "run.name=third"))
        return [chosen, run.chain.trained(), advanced(run, 1), length(run.run), str(refused.value).replace(name, "")]

    assert seen("small") == seen("shorter")
    assert seen("small")[1:3] == [2, 3]


def test_a_run_grows_by_what_it_has(make_config: Make) -> None:
    context = prepare(make_config("run.epochs=1"))
    run_epoch(context, 1)
    root = context.store.root.uri
    assert context.chain.trained() == 1
    assert grown(context, None) is context
    assert grown(context, 3).config.run.epochs == 4
    extend(open_run(root, "small"), 2)
    assert open_run(root, "small").config.run.epochs == 4, "never less"
    extend(open_run(root, "small"), 5)
    assert open_run(root, "small").config.run.epochs == 5
    assert open_run(root, "small", reads=True).chain.trained() == 1


def test_a_run_grows_with_a_stage_that_can_run(make_config: Make) -> None:
    context = prepare(make_config("run.epochs=1"))
    root = context.store.root.uri
    for node in context.plan.scored(1):
        run_stage(context, node.stage, 1, node.slot)

    def grown_for(stage: str) -> int:
        run = open_run(root, "small", reads=True)
        extend_for(run, Node(chosen_epoch(run, stage, "next"), stage))
        return open_run(root, "small").config.run.epochs

    for stage in ("rollout", "score"):
        with pytest.raises(NotCommittedError, match="epoch"):
            grown_for(stage)
        assert open_run(root, "small").config.run.epochs == 1
    for node in context.plan.training(1):
        run_stage(context, node.stage, 1, node.slot)
    assert grown_for("rollout") == 2


@pytest.mark.campaign
@pytest.mark.slow
def test_the_command_line_trains_on(flowmill: FlowmillCommand, config_file: Path, tmp_path: Path) -> None:
    given = ["--root", str(tmp_path / "store"), "--set", "evaluate.every=9", "--quiet"]
    for epochs in (1, 3):
        done = flowmill("run", str(config_file), "--advance", str(1 if epochs == 1 else 2), *given)
        assert done.returncode == 0, done.stderr
        assert open_run(str(tmp_path / "store"), "small", reads=True).chain.trained() == epochs
    plain = flowmill("run", str(config_file), *given[:4])
    assert "it keeps them" in plain.stdout, plain.stderr
    assert "No model was run" in plain.stdout
    client = open_client(str(tmp_path / "store"), None)
    champion = client.get_model_version_by_alias("flowmill-small", "champion")
    assert champion.tags["flowmill.epoch"] == "3"
    again = flowmill("run", str(config_file), "--dry", *given[:4])
    assert "it keeps them" in again.stdout
    assert "Nothing to do" in again.stdout
    dry = flowmill("run", str(config_file), "--advance", "1", "--dry", *given[:4])
    assert "optimize" in dry.stdout, dry.stderr
    made = flowmill("stage", "rollout", "--run", "small", "--epoch", "next", "--root", str(tmp_path / "store"))
    assert "rollout@4 trajectories/" in made.stdout, made.stderr
    wrong = flowmill("stage", "rollout", "--run", "small", "--epoch", "last", "--root", str(tmp_path / "store"))
    assert wrong.returncode == 2
    assert "'last' is no epoch" in wrong.stderr


def test_presets_have_names() -> None:
    assert "digits" in presets()
    assert config_file("digits").resolve() == ROOT / "configs" / "digits.yaml"
    assert load_config("digits").run.name == "digits"
    with pytest.raises(ConfigError, match="nothing-like-it"):
        load_config("nothing-like-it")


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'digits'"):
        copy_preset("digit", Path("nowhere"))


def test_a_request_names_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="epoch"):
        StageRequest(run="r", epoch="last")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch"):
        StageRequest(run="r", epoch=-1)
