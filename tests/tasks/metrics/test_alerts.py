"""Alerts: each rule fires on figures with its fault, once per episode, and on no healthy figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from scipy.stats import ttest_rel

from configs.load import load_config
from configs.schema import RunConfig
from tasks.algorithms.resampling import FEWEST
from tasks.metrics import alerts as module
from tasks.metrics.alerts import FALSE_ALARMS, Alert, Watcher, _updates, alerts, fall_by_chance
from tasks.metrics.describe import describe_run
from tasks.metrics.evaluations import scores_by_prompt
from tasks.metrics.rules import RULES, History
from tests.support.inside import evaluate, prepare, run_epoch
from tests.support.rewards import Fading

Make = Callable[..., RunConfig]
Epoch = Mapping[str, float]
HEALTHY: Epoch = {
    "optimize/approx_kl/median": 0.01,
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
    "kl": _then({"optimize/approx_kl/median": 0.5}),
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
    history = History(config, epochs)
    fires = {
        name: [e for e in range(1, len(epochs) + 1) if rule.fires(history.upto(e))] for name, rule in RULES.items()
    }
    return {name: found for name, found in fires.items() if found}


def test_every_rule_has_a_run_with_its_fault() -> None:
    assert FAULTS.keys() == RULES.keys()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_fires_on_its_fault_alone(config: RunConfig, name: str) -> None:
    epochs = FAULTS[name]
    assert _fired(config, epochs) == {name: [len(epochs)]}, "at the last epoch, and no other rule"
    text = RULES[name].text(str(RULES[name].fires(History(config, epochs))))
    assert text.count(". ") >= 1
    assert text.endswith(".")


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
    made = _updates({"updates": [{"approx_kl": each} for each in (0.0, 0.1, 2.0, 0.2)]})
    assert made == {
        "optimize/approx_kl": pytest.approx(0.575),
        "optimize/approx_kl/max": 2.0,
        "optimize/approx_kl/median": 0.2,
        "optimize/approx_kl/last": 0.2,
    }
    kinds = {name.split("/", 2)[2] for name in HEALTHY if name.startswith("optimize/") and name.count("/") > 1}
    assert kinds <= {"max", "median", "last"}


def test_alerts_are_read_from_committed_artifacts_once_per_episode(make_config: Make) -> None:
    """All rewards are equal, so no group has spread."""
    context = prepare(make_config('rewards=[{name: "tests.support.rewards:Constant"}]', "run.epochs=4"))
    watcher, begun = Watcher(context.chain), list[Alert]()
    for epoch in range(1, 4):
        run_epoch(context, epoch)
        begun += watcher.trained(epoch)
    assert [alert.label for alert in begun] == ["no_spread@2"]
    assert alerts(context.chain) == begun, "one answer as the run grows and afterwards"
    assert describe_run(context)["warnings"] == [alert.text for alert in begun]


def test_held_out_scores_that_fall_are_an_alert(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training changes in one small step is chance; a fall of all scores is not. An evaluation is read once."""
    prompts = tmp_path / "heldout.txt"
    prompts.write_text("".join(f"prompt {n}\n" for n in range(FEWEST)), encoding="utf-8")
    fading = 'rewards=[{name: "tests.support.rewards:Fading"}]'
    context = prepare(
        make_config(fading, f"prompts.heldout={prompts}", "evaluate.every=1", "evaluate.samples=20", "run.epochs=3")
    )
    read = Mock(wraps=scores_by_prompt)
    monkeypatch.setattr(module, "scores_by_prompt", read)
    watcher, begun = Watcher(context.chain), list[Alert]()
    for epoch in range(4):
        if epoch:
            run_epoch(context, epoch)
        monkeypatch.setattr(Fading, "lowered", 0.1 * (epoch >= 2))
        evaluate(context, epoch)
        begun += watcher.evaluated(epoch)
    (slot,) = (section.slot for section in context.config.rewards)
    assert [alert.label for alert in begun] == [f"heldout[{slot}]@2"]
    assert [alert for alert in alerts(context.chain) if alert.rule == "heldout"] == begun
    last = context.chain.require(2, "judge", slot).ref
    reads = [call.args[1] for call in read.mock_calls]
    assert reads.count(last) == 2, "once as the run grew, and once afterwards"


def test_chance_of_a_fall_is_a_paired_test_of_the_prompts_with_both_scores() -> None:
    drawn = np.random.default_rng(0)
    before = dict(zip(map(str, range(64)), drawn.normal(0.5, 0.2, 64), strict=True))
    changed = {prompt: score - 0.02 + 0.1 * drawn.normal() for prompt, score in before.items()}
    expected = ttest_rel([*changed.values()], [*before.values()], alternative="less").pvalue
    assert fall_by_chance(before, changed) == pytest.approx(expected)
    assert fall_by_chance({**before, "none": np.nan, "old": 1.0}, {**changed, "none": 0.0}) == pytest.approx(expected)
    assert fall_by_chance(before, before) == 1.0
    few = dict(list(before.items())[: FEWEST - 1])
    assert fall_by_chance(few, {prompt: 0.0 for prompt in few}) == 1.0, "too few prompts for a test"


def test_levels_of_all_evaluations_sum_to_the_stated_rate() -> None:
    assert sum(FALSE_ALARMS * 6 / (np.pi * k) ** 2 for k in range(1, 10**5)) == pytest.approx(FALSE_ALARMS, rel=1e-4)
