"""A run that goes back after an alert: where its branch starts, what it keeps, and that no kill changes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError, StoppedError
from configs.schema import RunConfig
from flows import artifacts
from flows.callbacks import RunCallbacks
from storage.artifacts.records import Manifest
from tasks.checks.check import check_config
from tasks.metrics.alerts import Alert, Watcher, alert_tag
from tasks.metrics.rules import RULES
from tasks.metrics.tracked import epoch_content
from tasks.runs.context import RunContext
from tasks.runs.opening import begin_run, open_run
from tasks.runs.staleness import State, standings
from tasks.runs.state import note_state, state_of
from tasks.specs.graph import Node
from tasks.stages.stage_run import StageRun
from tests.support.inside import make_stage, prepare

Make = Callable[..., RunConfig]

BACK = ["watch={on: {kl: back}, rate: 0.25}", "run.epochs=4", "evaluate.every=2", "optimize.updates_per_epoch=2"]


@pytest.fixture
def firing(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the epochs after which the rule 'kl' fires."""
    epochs: set[int] = set()
    found = dataclasses.replace(RULES["kl"], fires=lambda history: "far" if len(history.epochs) in epochs else None)
    monkeypatch.setitem(RULES, "kl", found)  # type: ignore[arg-type]
    return epochs


def work(context: RunContext) -> Iterator[Node]:
    """Yield the nodes that a pipeline runs after the setup, but the export."""
    return (node for node in context.plan.nodes() if node.stage != "export" and node not in [*context.plan.setup()])


def run(config: RunConfig) -> RunContext:
    context = prepare(config)
    for node in work(context):
        StageRun(make_stage(context, *node[1::-1], node.slot)).execute()
    return context


def manifest(context: RunContext, epoch: int, stage: str) -> Manifest:
    return context.store.require(context.chain.require(epoch, stage).ref)


def test_a_branch_starts_from_the_best_policy_before(make_config: Make, firing: set[int], tmp_path: Path) -> None:
    firing.add(2)
    context = run(make_config(*BACK))
    rewards = [manifest(context, epoch, "advantage").summary["reward_mean"] for epoch in (1, 2)]
    best = 1 if rewards[1] >= rewards[0] else 0
    decision = manifest(context, 2, "steer").summary
    assert (decision["policy"], decision["rate"]) == (best, 0.25)
    assert f"epoch 3 starts from the policy after epoch {best}" in decision["reason"]
    assert [manifest(context, epoch, "steer").summary["policy"] for epoch in (1, 3)] == [1, 3]
    # The branch samples and trains the best policy, at a smaller rate from then on; nothing before it is gone.
    assert manifest(context, 3, "rollout").inputs[0] == str(context.policy_ref(best))
    trained = manifest(context, 3, "optimize")
    assert trained.inputs[0] == str(context.policy_ref(best))
    assert trained.inputs[-1] == context.chain.require(2, "steer").artifact
    assert manifest(context, 4, "optimize").inputs[0] == str(context.policy_ref(3))
    assert [manifest(context, epoch, "optimize").options.get("rate") for epoch in (1, 2, 3, 4)] == [
        None,
        None,
        0.25,
        0.25,
    ]
    rates = [manifest(context, epoch, "optimize").summary["updates"][0]["lr"] for epoch in (1, 2, 3, 4)]
    assert rates == pytest.approx([1e-3, 1e-3, 2.5e-4, 2.5e-4])
    fresh = open_run(context.store.root.uri, "small")
    assert {each.state for each in standings(fresh.chain) if each.node.stage != "export"} == {State.FRESH}
    # Curves go on, although the branch counts its updates from where it starts.
    contents = [epoch_content(fresh.chain, epoch) for epoch in (1, 2, 3, 4)]
    steps = [p.step for made in contents if made is not None for p in made.points if p.key == "optimize/loss"]
    assert steps == [*range(1, 9)]
    # Without the action the same run goes on from the policy it has; the branch stays in the store.
    branch = context.policy_ref(4)
    plain = begin_run(make_config(*BACK[1:]))
    assert plain.chain.find(3, "optimize") is None
    assert plain.store.manifest(branch) is not None


def test_a_kill_changes_nothing_of_a_branch(make_config: Make, firing: set[int], tmp_path: Path) -> None:
    firing |= {1, 2}
    whole = run(make_config(f"store.root={tmp_path / 'whole'}", *BACK))
    assert manifest(whole, 2, "steer").summary["rate"] == 0.0625
    context = prepare(make_config(*BACK))
    for node in work(context):
        again = open_run(context.store.root.uri, "small")
        StageRun(make_stage(again, *node[1::-1], node.slot)).execute()
    assert open_run(context.store.root.uri, "small").chain.digest() == whole.chain.digest()


def test_an_episode_is_one_alert_but_steers_as_long_as_it_lasts(make_config: Make, firing: set[int]) -> None:
    firing |= {1, 2, 4}
    context = run(make_config(*BACK))
    labels = [alert.label for alert in Watcher(context.chain).all() if alert.rule == "kl"]
    assert labels == ["kl@1", "kl@4"]
    assert set(labels) <= set(alert_tag(context.chain).split(", "))
    assert [alert.epoch for alert in Watcher(context.chain).firing(2) if alert.rule == "kl"] == [2]


def test_an_event_that_is_announced_again_has_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect stores an event of a known id once; the same run of another store has events of its own."""
    ids: list[Any] = []
    monkeypatch.setattr(artifacts, "has_lasting_api", lambda: True)
    monkeypatch.setattr(artifacts, "emit_event", lambda event, **facts: ids.append(facts["id"]))
    for store, epoch in (("a", 1), ("a", 1), ("a", 2), ("b", 1)):
        artifacts.announce("alert", "small", once=store, epoch=epoch)
    artifacts.announce("exported", "small", epoch=1)
    assert ids[0] == ids[1]
    assert len(set(ids[:4])) == 3
    assert ids[4] is None


class _Tracker:
    tagged = 0

    def log_alerts(self) -> None:
        self.tagged += 1


@pytest.mark.parametrize(
    ("action", "settings", "others"),
    [
        ("warn", [], ""),
        ("stop", [], "'warn' or 'back'"),
        ("stop", ["execution.ahead=1"], "'warn'"),
        ("stop", ["optimize.replay={epochs: 1}"], "'warn'"),
    ],
)
def test_an_alert_may_stop_a_run(make_config: Make, action: str, settings: list[str], others: str) -> None:
    context = prepare(make_config(f"watch.on.kl={action}", *settings))
    callbacks: Any = object.__new__(RunCallbacks)
    callbacks._context, callbacks._run, callbacks._tracker = context, "small", _Tracker()
    alerts = [Alert(rule="entropy", epoch=1, text="low"), Alert(rule="kl", epoch=1, text="epoch 1: far.")]
    if action == "warn":
        callbacks._warn(alerts)
    else:
        with pytest.raises(
            StoppedError, match=rf"as watch.on.kl says: epoch 1: far\. .* set watch.on.kl to {others}\.$"
        ) as error:
            callbacks._warn(alerts)
        note_state(context, "held", error.value)
        assert state_of(context, complete=False).startswith("stopped: Run 'small' ends here, as watch.on.kl says")
    assert callbacks._tracker.tagged == 1


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["watch.on.kll=stop"], "there is no rule 'kll'. Did you mean 'kl'"),
        (["watch.on.kl=pause"], "must be 'warn', 'stop' or 'back'"),
        (
            ["watch.on.monitor=back"],
            "watch.on.monitor is 'back', but there are no monitors, so the rule never fires. Add",
        ),
        (["watch.on.heldout=stop", "prompts.heldout=null"], "watch.on.heldout is 'stop', but there are no held-out"),
        (["watch.on.kl=back", "execution.ahead=1"], "'back', but with execution.ahead epochs after that would train"),
        (["watch.on.kl=back", "optimize.replay={epochs: 1}"], "but with optimize.replay epochs after"),
    ],
)
def test_actions_that_cannot_work_are_refused(make_config: Make, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(make_config(*overrides))
    assert expected in str(error.value)


def test_a_rule_without_a_figure_may_warn_and_one_with_a_figure_may_act(make_config: Make) -> None:
    check_config(make_config("watch.on={monitor: warn, heldout: warn}", "prompts.heldout=null"))
    check_config(make_config("watch.on={monitor: stop, heldout: stop}", "monitors=[jpeg_incompressibility]"))
