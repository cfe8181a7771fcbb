"""Alerts: each rule fires on figures with its fault, once per episode, and on no healthy figures; what
they may do to a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from scipy.stats import ttest_rel

from flowmill.configs.errors import StoppedError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.flows import artifacts
from flowmill.flows.callbacks import RunCallbacks
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import LineageEntry, RunFolder
from flowmill.tasks.algorithms import resampling
from flowmill.tasks.algorithms.resampling import FEWEST, chance_of_fall
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.metrics import alerts as module
from flowmill.tasks.metrics.alerts import FALSE_ALARMS, Alert, Watcher, _updates, alerts, fall_by_chance
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.metrics.evaluations import scores_by_prompt
from flowmill.tasks.metrics.rules import RULES, History
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.reports.report.reading import read_run
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.staleness import side_results
from flowmill.tasks.runs.state import note_state, state_of
from tests.support.inside import Make, evaluate, prepare, run_epoch
from tests.support.rewards import Fading

Epoch = Mapping[str, float]
HEALTHY: Epoch = {
    "optimize/kl_epoch": 0.01,
    "optimize/kl_epoch_limit": 0.5,
    "optimize/kl_base": 0.2,
    "optimize/kl_base_limit": 2.0,
    "optimize/clip_low/last": 0.2,
    "optimize/clip_high/last": 0.1,
    "optimize/grad_norm/max": 1.0,
    "optimize/entropy": 0.5,
    "optimize/sampler_gap/max": 1e-6,
    "optimize/length": 3.0,
    "advantage/zero_std_ratio": 0.4,
    "advantage/explained_variance": 0.3,
    "advantage/excluded_samples": 1.0,
    "rollout/samples": 100.0,
    "rollout/repeats": 30.0,
}


def _then(*changes: Epoch) -> list[Epoch]:
    """Return three healthy epochs, and one with each of the changes."""
    return [HEALTHY] * 3 + [{**HEALTHY, **change} for change in changes]


FAULTS: Mapping[str, Sequence[Epoch]] = {
    "kl": _then({"optimize/kl_epoch": 0.5}),
    "clipped": _then({"optimize/clip_low/last": 0.5, "optimize/clip_high/last": 0.4}),
    "gradient_exploding": _then({"optimize/grad_norm/max": 100.0}),
    "gradient_zero": _then({"optimize/grad_norm/max": 0.0}),
    "entropy": _then({"optimize/entropy": 0.01}),
    "log_prob_gap": _then({"optimize/sampler_gap/max": 0.01}),
    "no_spread": _then(*[{"advantage/zero_std_ratio": 0.95}] * 2),
    "explained_variance": _then(*[{"advantage/explained_variance": -0.1}] * 3),
    "length": _then(*[{"optimize/length": 4.8}] * 2),
    "identical_samples": _then({"rollout/repeats": 80.0}),
    "excluded": _then({"advantage/excluded_samples": 10.0}),
}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config("addition_ppo", ["critic.alone_epochs=0"])


def _fired(config: RunConfig, epochs: Sequence[Epoch]) -> dict[str, list[int]]:
    histories = {e: History(config, epochs[:e]) for e in range(1, len(epochs) + 1)}
    fires = {name: [e for e, history in histories.items() if rule.fires(history)] for name, rule in RULES.items()}
    return {name: found for name, found in fires.items() if found}


def test_every_rule_has_a_run_with_its_fault() -> None:
    assert FAULTS.keys() == RULES.keys()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_fires_on_its_fault_alone(config: RunConfig, name: str) -> None:
    epochs = FAULTS[name]
    assert _fired(config, epochs) == {name: [len(epochs)]}, "at the last epoch, and no other rule"
    text = RULES[name].text(str(RULES[name].fires(History(config, epochs))), config)
    assert text.count(". ") >= 1
    assert text.endswith(".")


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"optimize/kl_base": 2.0}, "the policy is 2 nats from the base model, 2 or more"),
        (
            {"optimize/kl_epoch": 0.0, "optimize/left_out_kl": 6.8},
            "is 6.8 nats from the policy that made the samples, with",
        ),
        (
            {"optimize/kl_epoch": 4e-4, "optimize/kl_epoch_limit": 2e-4},
            "0.0004 nats from the policy that made the samples",
        ),
    ],
)
def test_either_kl_that_explodes_fires_and_so_does_one_that_is_undone(
    config: RunConfig, figures: Epoch, expected: str
) -> None:
    found = RULES["kl"].fires(History(config, _then(figures)))
    assert found is not None
    assert expected in found


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [],
            "(0.0003) or the updates per epoch (8) or clip_range (0.2); raise kl_coef (0); set optimize.stop_kl, which",
        ),
        (
            ["optimize.learning_rate=0.03", "optimize.updates_per_epoch=1", "optimize.stop_kl=0.1"],
            "Lower optimize.learning_rate (0.03) or clip_range (0.2, which one update per epoch does not meet); "
            "raise kl_coef (0).",
        ),
        (
            ["optimize.algorithm={name: 'nowhere:Mine'}"],
            "Lower optimize.learning_rate (0.0003) or the updates per epoch (8); ",
        ),
    ],
)
def test_the_remedy_of_a_kl_names_the_values_of_the_run(overrides: list[str], expected: str) -> None:
    assert expected in RULES["kl"].text("evidence", load_config("addition_grpo", overrides))


def test_healthy_and_empty_figures_fire_nothing(config: RunConfig) -> None:
    assert _fired(config, [HEALTHY] * 20) == {}
    assert _fired(config, [{}] * 20) == {}, "a run without a figure has no fault of it"


def test_gradients_of_a_held_policy_are_no_fault() -> None:
    held = load_config("addition_ppo", ["critic.alone_epochs=2"])
    still = {**HEALTHY, "optimize/grad_norm/max": 0.0}
    assert _fired(held, [still] * 4) == {"gradient_zero": [3, 4]}


def test_a_norm_that_is_not_finite_is_a_fault_at_once(config: RunConfig) -> None:
    assert _fired(config, [{"optimize/grad_norm/max": float("inf")}]) == {"gradient_exploding": [1]}


def test_figures_of_an_epoch_are_those_that_rules_read() -> None:
    updates = [{"approx_kl": each} for each in (0.0, 0.1, 2.0, 0.2)]
    made = _updates({"updates": updates, "kl_epoch": 0.3, "left_out": 2})
    assert made == {
        "optimize/kl_epoch": 0.3,
        "optimize/left_out": 2.0,
        "optimize/approx_kl": pytest.approx(0.575),
        "optimize/approx_kl/max": 2.0,
        "optimize/approx_kl/median": 0.2,
        "optimize/approx_kl/last": 0.2,
    }
    kinds = {name.split("/", 2)[2] for name in HEALTHY if name.startswith("optimize/") and name.count("/") > 1}
    assert kinds <= {"max", "median", "last"}


def test_alerts_are_read_from_committed_artifacts_once_per_episode(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rewards are equal, so no group has spread. A rule is evaluated once per epoch of a growing run."""
    evaluated = Mock(wraps=RULES["no_spread"].fires)
    monkeypatch.setitem(RULES, "no_spread", replace(RULES["no_spread"], fires=evaluated))
    context = prepare(make_config('rewards=[{name: "tests.support.rewards:Constant"}]', "run.epochs=4"))
    watcher, begun = Watcher(context.chain), list[Alert]()
    for epoch in range(1, 4):
        run_epoch(context, epoch)
        begun += watcher.trained(epoch)
    assert [alert.label for alert in begun] == ["no_spread@2"]
    assert evaluated.call_count == 3
    assert alerts(context.chain) == begun, "one answer as the run grows and afterwards"
    assert describe_run(context)["warnings"] == [alert.text for alert in begun]


def evaluated_on_20_prompts(make_config: Make, folder: Path, reward: str, *settings: str) -> RunContext:
    prompts = folder / "heldout.txt"
    prompts.write_text("".join(f"prompt {n}\n" for n in range(20)), encoding="utf-8")
    settings += (f"rewards=[{reward}]", f"prompts.heldout={prompts}", "evaluate.samples=20")
    return prepare(make_config(*settings))


def test_held_out_scores_that_fall_are_an_alert_once_per_episode(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training changes in one small step is chance; a fall of all scores is not. An evaluation is read once."""
    reward = '{name: "tests.support.rewards:Fading"}'
    context = evaluated_on_20_prompts(make_config, tmp_path, reward, "evaluate.every=1", "run.epochs=5")
    read = Mock(wraps=scores_by_prompt)
    monkeypatch.setattr(module, "scores_by_prompt", read)
    watcher, begun = Watcher(context.chain), list[Alert]()
    for epoch in range(6):
        if epoch:
            run_epoch(context, epoch)
        # The score falls, stays low, is back, and falls again.
        monkeypatch.setattr(Fading, "lowered", 0.1 * (epoch in (2, 3, 5)))
        evaluate(context, epoch)
        begun += watcher.evaluated(epoch)
    (slot,) = (section.slot for section in context.config.rewards)
    assert [alert.label for alert in begun] == [f"heldout[{slot}]@2", f"heldout[{slot}]@5"]
    assert [alert for alert in alerts(context.chain) if alert.rule == "heldout"] == begun
    last = context.chain.require(3, "judge", slot).ref
    reads = [call.args[1] for call in read.mock_calls]
    assert reads.count(last) == 2, "once as the run grew, and once afterwards"


def test_held_out_scores_compare_the_prompts_that_both_evaluations_have(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst prompts lose their score and all others fall: the mean of all rises."""
    reward = '{name: "tests.support.rewards:FadingWithoutTheWorst", on_failure: exclude_sample}'
    context = evaluated_on_20_prompts(make_config, tmp_path, reward, "run.epochs=1")
    evaluate(context, 0)
    run_epoch(context, 1)
    monkeypatch.setattr(Fading, "lowered", 0.1)
    evaluate(context, 1)
    result = read_run(context).headline
    assert result is not None
    assert (result.prompts, result.left_out) == (10, 10)
    assert result.change.mean == pytest.approx(-0.1, abs=0.03)
    assert "10 held-out prompts (10 more have a score of one evaluation alone)" in run_report(context)
    (alert,) = (each for each in alerts(context.chain) if each.rule == "heldout")
    assert f"fell from {result.before.mean:.4g} before training to {result.after.mean:.4g}," in alert.text


def test_chance_of_a_fall_is_a_paired_test_of_the_prompts_with_both_scores() -> None:
    """Of symmetric changes it is Student's, with one more prompt that gained."""
    drawn = np.random.default_rng(0)
    before = dict(zip(map(str, range(64)), drawn.normal(0.5, 0.2, 64), strict=True))
    changed = {prompt: score - 0.02 + 0.1 * drawn.normal() for prompt, score in before.items()}
    gained = {prompt: score for prompt, score in changed.items()} | {"one more": 1.0}
    expected = ttest_rel([*gained.values()], [*before.values(), 0.8], alternative="less").pvalue
    found = fall_by_chance(before, changed, most=0.2)
    assert expected <= found <= 1.5 * expected
    assert fall_by_chance({**before, "none": np.nan, "old": 1.0}, {**changed, "none": 0.0}, most=0.2) == found
    assert fall_by_chance(before, changed) > found, "a gain of three times the largest deviation"
    assert fall_by_chance(before, before) == 1.0
    few = dict(list(before.items())[: FEWEST - 1])
    assert fall_by_chance(few, {prompt: 0.0 for prompt in few}) == 1.0, "too few prompts for a test"


#: Changes of mean 0, of which a t-test calls 17 to 82 % a fall in one of six evaluations, and their largest gain.
CHANGES: Mapping[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "even": (lambda draw, n: draw.normal(0, 0.1, n), np.inf),
    "lognormal": (lambda draw, n: draw.lognormal(0, 1, n) - np.exp(0.5), np.inf),
    "more so": (lambda draw, n: draw.lognormal(0, 1.5, n) - np.exp(1.125), np.inf),
    "rare gains": (lambda draw, n: np.where(draw.random(n) < 0.02, 0.98, -0.02), 1.0),
    "less rare": (lambda draw, n: np.where(draw.random(n) < 0.1, 0.9, -0.1) + draw.normal(0, 0.02, n), 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_skewed_changes_are_called_a_fall_as_rarely_as_stated(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """100 runs of six evaluations of 50 prompts that have nothing in common but their mean."""
    monkeypatch.setattr(resampling, "_RESAMPLES", 2000)
    draw, (make, most) = np.random.default_rng(3), CHANGES[name]
    levels = [FALSE_ALARMS * 6 / (np.pi * k) ** 2 for k in range(1, 7)]
    false = sum(any(chance_of_fall(make(draw, 50), most=most) <= level for level in levels) for _ in range(100))
    assert false <= 10, "5 of 100, and two and a half standard errors"
    fallen = sum(chance_of_fall(make(draw, 50) - 2 * make(draw, 999).std(), most=most) <= levels[0] for _ in range(50))
    assert fallen >= 35, "what falls by two standard deviations is seen"


def test_levels_of_all_evaluations_sum_to_the_stated_rate() -> None:
    assert sum(FALSE_ALARMS * 6 / (np.pi * k) ** 2 for k in range(1, 10**5)) == pytest.approx(FALSE_ALARMS, rel=1e-4)


def test_an_event_is_emitted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Automations act on every event: one of an alert of an earlier epoch would pause a deployment each night."""
    events: list[Any] = []
    monkeypatch.setattr(artifacts, "has_lasting_api", lambda: True)
    monkeypatch.setattr(artifacts, "emit_event", lambda event, **facts: events.append((event, facts["payload"])))
    for start in range(2):
        run = RunFolder(ArtifactStore(str(tmp_path)), "small")
        for epoch in range(1, 3 + start):
            artifacts.announce("alert", run, rule="kl", epoch=epoch)
        artifacts.announce("exported", run, artifact="exports/a", epoch=2)
    artifacts.announce("exported", run, artifact="exports/b", epoch=2)
    alerts = [("flowmill.alert", {"rule": "kl", "epoch": epoch}) for epoch in range(1, 4)]
    exported = ("flowmill.exported", {"epoch": 2})
    assert events == [*alerts[:2], exported, alerts[2], exported]
    run.add("announced", {"events": "not a list"})
    artifacts.announce("alert", RunFolder(ArtifactStore(str(tmp_path)), "small"), rule="kl", epoch=1)
    assert len(events) == 6


def test_events_wait_for_a_lasting_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(artifacts, "has_lasting_api", lambda: False)
    run = RunFolder(ArtifactStore(str(tmp_path)), "small")
    artifacts.announce("alert", run, rule="kl", epoch=1)
    assert run.newest("announced") is None


class _Tracker:
    tagged = 0

    def log_alerts(self) -> None:
        self.tagged += 1


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_an_alert_may_stop_a_run(make_config: Make, action: str) -> None:
    context = prepare(make_config(f"watch.on.kl={action}"))
    callbacks: Any = object.__new__(RunCallbacks)
    callbacks._context, callbacks._run, callbacks._tracker = context, "small", _Tracker()
    alerts = [Alert(rule="entropy", epoch=1, text="low"), Alert(rule="kl", epoch=1, text="epoch 1: far.")]
    if action == "warn":
        callbacks._warn(alerts)
    else:
        with pytest.raises(
            StoppedError, match=r"as watch.on.kl says: epoch 1: far\. .* set watch.on.kl to 'warn'\.$"
        ) as error:
            callbacks._warn(alerts)
        note_state(context, "held", error.value)
        assert state_of(context, complete=False).startswith("stopped: Run 'small' ends here, as watch.on.kl says")
    assert callbacks._tracker.tagged == 1


def test_a_rule_may_act_with_and_without_a_figure(make_config: Make) -> None:
    check_config(make_config("watch.on={monitor: stop, heldout: stop}", "prompts.heldout=null"))
    check_config(make_config("watch.on={monitor: stop, heldout: stop}", "monitors=[jpeg_incompressibility]"))


def test_decisions_of_earlier_versions_are_side_results(make_config: Make) -> None:
    context = prepare(make_config("watch={on: {kl: warn}, rate: 0.1}"))
    made = context.chain.require(0, "preprocess")
    context.run.append(LineageEntry(epoch=1, stage="steer", slot="", artifact=made.artifact, forced=False))
    assert [side.label for side in side_results(context.chain)] == ["stage 'steer' no longer exists"]
