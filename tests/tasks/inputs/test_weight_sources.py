"""Several prompt sources: mixed by weight, scored by rewards of their own, distinguished in figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flowmill.configs.errors import ConfigError, PromptError
from flowmill.configs.load import load_config
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.checks.try_rewards import try_rewards
from flowmill.tasks.inputs.prompts import SOURCE
from flowmill.tasks.inputs.source_prompts import source_prompts
from flowmill.tasks.metrics.evaluations import evaluation_figures, rollout_reward, weighted_reward
from flowmill.tasks.metrics.scores import mean_figures
from flowmill.tasks.metrics.tracked import epoch_content
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.report.headline import evaluated
from flowmill.tasks.runs.seeds import mixed_prompts, most_of_each
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.stages import judge, score
from tests.conftest import FlowmillCommand
from tests.support.inside import Make, evaluate, make_stage, prepare, run_epoch, updates_of


@pytest.fixture
def mixed(config_file: Path, tmp_path: Path) -> Make:
    """Returns the small config with two sources: digits scored by a classifier, colors by the size of their JPEG."""
    (tmp_path / "colors.jsonl").write_text("".join(json.dumps({"prompt": f"color {n}"}) + "\n" for n in range(6)))
    (tmp_path / "shades.txt").write_text("shade 1\nshade 2\n")
    digits = {"name": "digits", "train": "train.txt", "heldout": "heldout.txt", "weight": 3.0}
    colors = {"name": "colors", "train": "colors.jsonl", "heldout": "shades.txt"}
    data = yaml.safe_load(config_file.read_text())
    data["prompts"] = {"sources": [digits, colors]}
    data["rewards"] = [
        {"name": "digits", "sources": ["digits"]},
        {"name": "jpeg_compressibility", "label": "jpeg", "sources": ["colors"], "weight": 2.0},
        {"name": "tests.support.rewards:brightness", "label": "bright", "weight": 0.1},
    ]
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(data))
    return lambda *overrides: load_config(path, overrides)


def sources_of(context: Any, epoch: int) -> list[str]:
    return [str(prompt.metadata[SOURCE]) for prompt in make_stage(context, "rollout", epoch).groups]


def test_shares_are_those_of_the_weights_in_every_stretch() -> None:
    sizes, weights = (40, 30, 50), (1.0, 2.0, 5.0)
    drawn = [mixed_prompts(sizes, weights, 8, seed=3, epoch=epoch) for epoch in range(1, 41)]
    counts = np.array([[sum(source == s for source, _ in each) for s in range(3)] for each in drawn])
    np.testing.assert_allclose(counts.sum(0) / counts.sum(), np.array(weights) / 8, atol=0.01)
    assert (np.abs(counts - np.array(weights)) <= 2).all(), "each epoch has close to its share"
    for each in drawn:
        assert len(set(each)) == 8, "no prompt twice in an epoch"
    flat = [index for each in drawn for source, index in each if source == 1]
    assert set(flat[:30]) == set(range(30)), "a pass takes every prompt once"
    most = most_of_each(weights, 8, 40)
    assert most == counts.max(0).tolist()
    full = [mixed_prompts(most, weights, 8, seed=3, epoch=epoch) for epoch in range(1, 41)]
    assert all(len(set(each)) == 8 for each in full), "as many prompts as the fullest epoch takes are enough"
    assert drawn == [mixed_prompts(sizes, weights, 8, seed=3, epoch=epoch) for epoch in range(1, 41)]
    assert drawn != [mixed_prompts(sizes, weights, 8, seed=4, epoch=epoch) for epoch in range(1, 41)]


def test_each_reward_scores_the_samples_of_its_sources(mixed: Make) -> None:
    context = prepare(mixed("rollout.prompts_per_epoch=4"))
    assert sorted(set(sources_of(context, 1))) == ["colors", "digits"]
    run_epoch(context, 1)
    run_epoch(context, 2)
    of_prompt = {prompt.id: str(prompt.metadata[SOURCE]) for prompt in context.prompts["train"]}
    parts = {}
    for slot, wanted in (("digits", {"digits"}), ("jpeg", {"colors"}), ("bright", {"digits", "colors"})):
        entry = context.chain.find(1, "score", slot)
        assert entry is not None
        table = read_rows(context.store, entry.ref).to_pydict()
        scored = [value is not None for value in table["reward"]]
        assert scored == [of_prompt[prompt] in wanted for prompt in table["prompt_id"]]
        assert all(scored[row] or not table["note"][row] for row in range(len(scored)))
        parts[slot] = [value or 0.0 for value in table["reward"]]
    entry = context.chain.find(1, "advantage")
    assert entry is not None
    found = read_rows(context.store, entry.ref).to_pydict()
    expected = [d + 2.0 * j + 0.1 * b for d, j, b in zip(*parts.values(), strict=True)]
    np.testing.assert_allclose(found["reward"], expected, rtol=1e-5)
    assert None not in found["advantage"]


def test_figures_are_told_by_source(mixed: Make) -> None:
    context = prepare(mixed("evaluate.samples=5"))
    run_epoch(context, 1)
    for epoch in (0, 1):
        evaluate(context, epoch)
    figures = evaluation_figures(context.chain, 1)
    heldout = figures["heldout"]
    assert set(heldout["bright"]) == {"mean", "digits_mean", "colors_mean"}
    assert heldout["bright"]["mean"] == pytest.approx(
        (3 * heldout["bright"]["digits_mean"] + 2 * heldout["bright"]["colors_mean"]) / 5
    ), "sources take turns: three digits and two shades"
    assert set(heldout["digits"]) == {"mean", "exact", "digits_mean", "digits_exact", "coverage"}
    assert heldout["digits"]["digits_mean"] == heldout["digits"]["mean"]
    expected = 0.6 * heldout["digits"]["mean"] + 0.4 * 2 * heldout["jpeg"]["mean"] + 0.1 * heldout["bright"]["mean"]
    assert weighted_reward(context.config, figures) == pytest.approx(expected)
    samples = [row.reward for row in evaluated(RunView(context), 1).values() if row.split == "heldout"]
    assert np.mean([each for each in samples if each is not None]) == pytest.approx(expected), "the same by sample"
    content = epoch_content(context.chain, 1)
    assert content is not None
    advantage = context.store.require(context.chain.require(1, "advantage").ref).summary
    points = {point.key: point.value for point in content.points}
    assert points["achieved/rollout"] == pytest.approx(advantage["reward_mean"]), "the same in rollouts"
    score = context.chain.find(1, "score", "bright")
    assert score is not None
    assert {"mean", "digits_mean"} <= set(context.store.require(score.ref).summary)


def test_the_weighted_reward_of_runs_of_earlier_versions_and_of_epochs_without_a_source(
    mixed: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_coverage(parts: Any) -> dict[str, float]:
        return {name: value for name, value in mean_figures(parts).items() if name != "coverage"}

    for module in (judge, score):
        monkeypatch.setattr(module, "mean_figures", without_coverage)
    context = prepare(mixed("rollout.prompts_per_epoch=2", "evaluate.samples=5"))
    sources = []
    for epoch in (1, 2):
        run_epoch(context, epoch)
        sources.append(set(sources_of(context, epoch)))
        advantage = context.store.require(context.chain.require(epoch, "advantage").ref).summary
        assert rollout_reward(context.chain, epoch) == pytest.approx(advantage["reward_mean"])
    assert {"digits"} in sources, "an epoch without colors"
    evaluate(context, 0)
    figures = evaluation_figures(context.chain, 0)
    assert (figures["heldout"]["digits"]["coverage"], figures["heldout"]["jpeg"]["coverage"]) == (0.6, 0.4)


def test_another_mixture_is_other_rollouts_and_other_files_of_the_same_prompts_are_not(
    mixed: Make, tmp_path: Path
) -> None:
    context = prepare(mixed())
    other = prepare(mixed("prompts.sources.0.weight=1.0", "run.name=other"))
    assert make_stage(context, "rollout", 1).ref != make_stage(other, "rollout", 1).ref
    (tmp_path / "moved.txt").write_text((tmp_path / "train.txt").read_text())
    moved = prepare(mixed(f"prompts.sources.0.train={tmp_path / 'moved.txt'}"))
    assert make_stage(moved, "rollout", 1).ref == make_stage(context, "rollout", 1).ref


def test_rewards_are_tried_on_a_prompt_of_their_own(mixed: Make) -> None:
    assert len(try_rewards(RunPlan(mixed()))) == 3
    check_config(mixed())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rewards.0.sources=[digit]"], "scores the source 'digit', which prompts.sources does not have. Did you mean"),
        (["rewards.2.sources=[digits]", "rewards.1.sources=[digits]"], "no reward scores the prompts of 'colors'"),
        (["rollout.prompts_per_epoch=12"], "takes up to 9 of the source 'digits', which holds 8 prompts"),
        (["prompts.train=train.txt"], "prompts needs either 'train'"),
        (["prompts.sources.1.name=digits"], "give each its own name"),
        (["prompts.sources.1.train=nowhere.txt"], "prompts.sources.1.train: 'nowhere.txt' does not exist"),
    ],
)
def test_sources_that_cannot_work_are_refused(mixed: Make, overrides: list[str], said: str) -> None:
    with pytest.raises((ConfigError, PromptError), match=said):
        check_config(mixed(*overrides))


def test_a_column_of_that_name_is_refused(mixed: Make, tmp_path: Path) -> None:
    (tmp_path / "colors.jsonl").write_text('{"prompt": "a", "prompt_source": "x"}\n')
    single = [f"prompts={{train: {tmp_path / 'colors.jsonl'}}}", "rewards=[digits]"]
    with pytest.raises(PromptError, match=r"prompts.train: prompt 'a' has a column 'prompt_source'"):
        check_config(mixed(*single))
    with pytest.raises(PromptError, match=r"prompts.sources.1.train: prompt 'a' has a column 'prompt_source'"):
        source_prompts(mixed())


def test_every_source_may_have_a_teacher(mixed: Make, tiny_base: Path) -> None:
    def asked(*names: str) -> str:
        folders = ", ".join(f"{name}: '{tiny_base}'" for name in names)
        return f"optimize.algorithm={{name: opd, options: {{teachers: {{{folders}}}}}}}"

    context = prepare(mixed(asked("digits", "colors")))
    run_epoch(context, 1)
    first = updates_of(context, 1)[0]
    # Both are the base model, which the policy still is.
    assert first["teacher_kl"] == pytest.approx(0.0, abs=1e-12)
    for names in (("digits",), ("digits", "shades")):
        with pytest.raises(ConfigError, match=r"every prompt needs one\. Give each source a teacher"):
            check_config(mixed(asked(*names)))


@pytest.mark.campaign
def test_a_run_over_sources_works_on_the_command_line(mixed: Make, flowmill: FlowmillCommand, tmp_path: Path) -> None:
    mixed()
    ended = flowmill("run", str(tmp_path / "mixed.yaml"), "--root", str(tmp_path / "cli"))
    assert ended.returncode == 0, ended.stderr
    assert "jpeg" in ended.stdout
    reported = flowmill("status", "small", "--root", str(tmp_path / "cli"))
    assert reported.returncode == 0, reported.stderr
