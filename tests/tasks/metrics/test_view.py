"""The read model of a run: its tables hold what the artifacts hold, and reading writes nothing; the
best epoch."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest

from flowmill.configs.errors import NotCommittedError, StoreError
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.metrics.best import best_epoch, best_of
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.metrics.evaluations import Figures, evaluation_figures, flat, mean_by_prompt, scores_by_prompt
from flowmill.tasks.metrics.samples import artifact_table, media_of
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.diffusion.exporting import evaluation_images
from flowmill.tasks.reports.comparison import compare
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.reports.report.headline import evaluated
from flowmill.tasks.runs.context import RunContext
from tests.support.inside import Make, evaluate, prepare, run_epoch, run_stage
from tests.support.small import small_config

JUDGE = 'evaluate.judges=[{name: "tests.support.rewards:brightness", label: bright}]'
LABEL = "jpeg_compressibility"


@pytest.fixture(scope="module")
def context(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """One epoch of two, evaluated before and after, each prompt list in two shards."""
    settings = (JUDGE, "execution.rollout_batch_size=1", "evaluate.samples=6", "evaluate.images=6")
    found = prepare(small_config(tmp_path_factory.mktemp("view"), tiny_base, *settings))
    evaluate(found, 0)
    run_epoch(found, 1)
    evaluate(found, 1)
    return found


def test_scores_and_samples_are_those_of_the_artifacts(context: RunContext) -> None:
    view, store, chain = RunView(context), context.store, context.chain
    assert (view.trained, view.rolled_out, sorted(view.evaluations)) == ([1], [1], [0, 1])
    judged = read_rows(store, chain.require(1, "judge", "bright").ref)
    scores = view.scores(1, evaluation=True)
    assert scores["sample_id"] == judged["sample_id"]
    assert scores["reward.bright"] == judged["reward"]
    assert scores["list"].to_pylist() == ["heldout"] * 6 + ["train"] * 6
    assert "reward" not in scores.column_names
    samples = view.samples(1, evaluation=True)
    assert samples["reward.bright"] == judged["reward"]
    assert samples["list"] == scores["list"]
    advantages = read_rows(store, chain.require(1, "advantage").ref)
    assert view.scores(1)["advantage"] == view.samples(1)["advantage"] == advantages["advantage"]
    assert "note.bright" not in samples.column_names, "it left none"
    assert view.scores(2).num_rows == 0
    with pytest.raises(NotCommittedError, match="no rollout for epoch 2"):
        view.samples(2)


def test_samples_without_media_have_no_picture(make_config: Make) -> None:
    found = prepare(make_config("rollout.media={format: none, latents: true}"))
    run_stage(found, "rollout", 1)
    ref = found.chain.require(1, "rollout").ref
    for read in (lambda: RunView(found).pictures(1), lambda: media_of(found.store, ref)):
        with pytest.raises(StoreError, match="has no image or clip: it is a text, "):
            read()


def test_every_reader_of_scores_gives_the_same_means(context: RunContext) -> None:
    view = RunView(context)
    ref, rows = context.chain.require(1, "judge", LABEL).ref, view.scores(1, evaluation=True).to_pylist()
    for split in ("heldout", "train"):
        chosen = [(row["prompt_id"], row[f"reward.{LABEL}"]) for row in rows if row["list"] == split]
        assert mean_by_prompt(chosen) == scores_by_prompt(context.store, ref, split)
        mean = evaluation_figures(context.chain, 1)[split][LABEL]["mean"]
        assert sum(score for _, score in chosen) / len(chosen) == pytest.approx(mean)
    assert {each.sample_id: each.reward for each in evaluated(view, 1).values()} == {
        row["sample_id"]: row[f"reward.{LABEL}"] for row in rows
    }, "a judge is not optimized"
    figures = {tuple(row.values())[1:4]: row["value"] for row in view.figures().to_pylist() if row["epoch"] == 1}
    assert figures == flat(evaluation_figures(context.chain, 1))
    assert isnan(mean_by_prompt([("a", None), ("b", 1.0), ("b", 3.0)])["a"])
    assert mean_by_prompt([("a", None), ("b", 1.0), ("b", 3.0)])["b"] == 2.0


def test_costs_are_of_every_artifact(context: RunContext) -> None:
    costs = RunView(context).costs().to_pylist()
    manifests = {entry.key: context.store.manifest(entry.ref) for entry in context.chain.entries()}
    made = {key: manifest.size for key, manifest in manifests.items() if manifest is not None}
    assert {(row["epoch"], row["stage"], row["slot"]): row["size"] for row in costs} == made
    assert all(row["seconds"] > 0 for row in costs if row["stage"] in ("rollout", "optimize", "evaluate"))


def test_a_card_shows_an_evaluation_of_several_shards(context: RunContext) -> None:
    view = RunView(context)
    ref = context.chain.require(1, "evaluate").ref
    assert len([record for record in context.store.shards(ref) if record.shard.startswith("heldout")]) == 2
    shown = evaluation_images(view, 1, "heldout", 5)
    table = artifact_table(context.store, ref).to_pylist()
    assert [each.prompt for each in shown] == [row["prompt"] for row in table[:5]]
    scores = view.scores(1, evaluation=True)[f"reward.{LABEL}"].to_pylist()
    assert [float(each.verdict) for each in shown] == pytest.approx(scores[:5], rel=1e-2)
    assert evaluation_images(view, 2, "heldout", 5) == []


def test_reading_writes_nothing(context: RunContext) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path(context.store.root.uri).rglob("*")}

    before, view = files(), RunView(context)
    for read in (view.figures, view.curves, view.lineage, view.costs):
        read()
    view.samples(1), view.samples(1, evaluation=True), view.pictures(1), view.films(1)
    describe_run(context), compare(context, context), run_report(context)
    assert files() == before


def scores(heldout: float | None, train: float) -> Figures:
    lists = {"train": train} if heldout is None else {"heldout": heldout, "train": train}
    return {split: {"a": {"mean": mean}, "judge": {"mean": 9.0}} for split, mean in lists.items()}


def test_the_best_is_the_earliest_of_the_highest_on_held_out_prompts(make_config: Make) -> None:
    config = make_config("rewards=[{name: jpeg_compressibility, label: a}]")
    heldout = {0: scores(0.1, 0.9), 2: scores(0.5, 0.2), 4: scores(0.5, 0.8), 6: scores(0.4, 0.9)}
    best = best_of(config, heldout)
    assert best is not None
    assert (best.epoch, best.reward, best.count) == (2, 0.5, 4)
    assert str(best) == "mean a on held-out prompts 0.500, the highest of 4 evaluations"
    heldout[2]["heldout"]["a"]["failed"] = 3
    best = best_of(config, heldout)
    assert str(best).endswith("of 4 evaluations; 3 of its scores failed, and its mean leaves them out")
    alone = best_of(config, {0: scores(None, 0.1), 2: scores(None, 0.3)})
    assert alone is not None
    assert (alone.epoch, alone.figure) == (2, "mean a on train prompts")
    assert best_of(config, {}) is None
    assert best_of(config, {0: {"heldout": {"judge": {"mean": 1.0}}}}) is None


def test_no_epoch_is_the_best_without_evaluations_or_below_the_base_model(make_config: Make) -> None:
    context = prepare(make_config())
    with pytest.raises(NotCommittedError, match=r"run 'small' has no evaluation.*small@EPOCH"):
        best_epoch(context)
    evaluate(context, 0)
    with pytest.raises(NotCommittedError, match="is better than epoch 0, before training"):
        best_epoch(context)
