"""Answers of raters: durable records, the artifact made of them, and figures with values worked by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score
from typer.testing import CliRunner

from flowmill.configs.errors import CorruptError, StoreError
from flowmill.flows.cli.app import app
from flowmill.storage.artifacts.checksummed_json import seal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.garbage_collection import Retention, plan_removals
from flowmill.storage.maintenance.transfer import copy_run
from flowmill.storage.maintenance.verify import verify_store
from flowmill.storage.trajectories.schema import PREFERENCES
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.ratings.answers import RatingAnswer, answers_of, append_answer, commit_preferences, withdraw_answer
from flowmill.tasks.ratings.figures import agreement_of, agreements, rating_report, win_rates
from flowmill.tasks.ratings.groups import RatedGroup, SampleSource, groups_of, next_group, order_of, sources_of
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from tests.support.inside import run_epoch


def answer(preferred: float | None = 1.0, *, rater: str = "ann", prompt: str = "p", sample: str = "s") -> RatingAnswer:
    return RatingAnswer(
        prompt_id=prompt,
        prompt="a cat",
        first_artifact="evaluations/0a",
        first_sample=sample,
        second_artifact="evaluations/0b",
        second_sample=sample,
        preferred=preferred,
        rater=rater,
        seconds=1.5,
    )


def compared(context: RunContext) -> list[SampleSource]:
    return sources_of(context, None, None, evaluation=False, scorer=None)


def answers(
    context: RunContext, rater: str, preferred: Any, count: int = 99, sources: Sequence[SampleSource] = ()
) -> list[RatedGroup]:
    """Answer pairs as the page does; ``preferred`` gives the answer to a left and a right sample."""
    pairs = groups_of(sources or compared(context), 0)
    for pair in pairs[:count]:
        left, right = order_of(pair, rater)
        append_answer(
            context.run,
            RatingAnswer(
                prompt_id=pair.prompt_id,
                prompt=pair.prompt,
                first_artifact=left[0],
                first_sample=left[1],
                second_artifact=right[0],
                second_sample=right[1],
                preferred=preferred(left, right),
                rater=rater,
                seconds=2.0,
            ),
        )
    return pairs[:count]


def test_answers_become_an_artifact_with_the_columns_of_preferences(context: RunContext) -> None:
    before, after = (source.artifact for source in compared(context))
    pairs = answers(context, "ann", lambda left, right: {before: 0.0, after: 1.0}[left[0]], 4)
    answers(context, "bob", lambda left, right: None, 1)
    withdraw_answer(context.run, 2)
    ref = commit_preferences(context.run)
    table = read_rows(context.store, ref)
    assert ref.kind == "preferences"
    assert table.schema.equals(PREFERENCES)
    assert table.column("number").to_pylist() == [1, 3, 4], "the skipped pair of bob and the withdrawn answer are none"
    for row, pair in zip(table.to_pylist(), [pairs[0], pairs[2], pairs[3]], strict=True):
        both = [(row["first_artifact"], row["first_sample"]), (row["second_artifact"], row["second_sample"])]
        assert sorted(both) == list(pair.key)
        assert row["preferred"] == (row["first_artifact"] == after)
        assert (row["prompt_id"], row["prompt"], row["rater"]) == (pair.prompt_id, pair.prompt, "ann")
    assert commit_preferences(context.run) == ref, "equal answers are the same artifact"
    answers(context, "cy", lambda left, right: 0.5, 1)
    assert commit_preferences(context.run) != ref


def test_an_answer_of_an_earlier_version_is_read() -> None:
    earlier = {
        name: value for name, value in asdict(answer(0.5)).items()
        if name not in ("task", "question", "others", "values", "both_bad", "note")
    }  # fmt: skip
    assert RatingAnswer.parse(seal(earlier), "runs/small/ratings/0001.json") == answer(0.5)


def test_preferences_are_kept_copied_and_verified_with_their_run(context: RunContext, tmp_path: Path) -> None:
    answers(context, "ann", lambda left, right: 1.0, 3)
    ref, target = commit_preferences(context.run), ArtifactStore(str(tmp_path / "copy"))
    assert plan_removals(context.store, Retention(older_than_s=0.0)) == []
    copy_run(context.store, target, "small", progress=lambda *_: None)
    assert answers_of(RunFolder(target, "small")) == answers_of(context.run)
    assert read_rows(target, ref).equals(read_rows(context.store, ref))
    assert verify_store(target, deep=True)["problems"] == []


@pytest.mark.slow
def test_rated_samples_of_past_epochs_and_of_other_runs_stay(context: RunContext, tmp_path: Path) -> None:
    run_epoch(open_run(context.store.root.uri, "small", overrides=["run.epochs=2"], trusted=True), 2)
    context = open_run(context.store.root.uri, "small", reads=True)
    store, past = context.store, str(context.chain.require(1, "rollout").ref)
    assert [each.label for each in plan_removals(store, Retention(keep_epochs=1, runs=["small"]))] == [past]
    other = open_run(store.root.uri, "other", reads=True)
    against = sources_of(context, other, 1, evaluation=True, scorer=None)
    rated = {source.artifact for source in against} | {past}
    answers(context, "ann", lambda left, right: 1.0, 1, sources_of(context, None, 1, evaluation=False, scorer=None))
    answers(context, "ann", lambda left, right: 1.0, 1, against)
    assert plan_removals(store, Retention(keep_epochs=1, runs=["small"])) == []
    removals = plan_removals(store, Retention(forget=["other"], older_than_s=0))
    assert removals[0].label == "runs/other"
    assert not rated & {each.label for each in removals}, "a kept run holds answers about them"
    removals = plan_removals(store, Retention(forget=["small"], older_than_s=0))
    assert removals[0].reason == "the run is given up, and 2 answers of raters with it"
    target = ArtifactStore(str(tmp_path / "copy"))
    copy_run(store, target, "small", progress=lambda *_: None)
    assert all(target.manifest(ArtifactRef.parse(each)) for each in rated), "a fit on the copy reads them"


def test_a_pair_is_answered_once_unless_it_is_undone(context: RunContext) -> None:
    answers(context, "ann", lambda left, right: 1.0, 1)
    ((number, given),) = answers_of(context.run).items()
    turned = replace(
        given,
        first_artifact=given.second_artifact,
        second_artifact=given.first_artifact,
        first_sample=given.second_sample,
        second_sample=given.first_sample,
    )
    for again in (given, turned):
        with pytest.raises(StoreError, match="'ann' has answered this pair already"):
            append_answer(context.run, again)
    append_answer(context.run, replace(given, rater="bob"))
    withdraw_answer(context.run, number)
    with pytest.raises(StoreError, match="no answer 1 that could be undone"):
        withdraw_answer(context.run, number)
    append_answer(context.run, turned)
    assert list(answers_of(context.run).values()) == [replace(given, rater="bob"), turned]
    # Nothing was edited: the first answer is stored as it was.
    assert len(context.store.root.list("runs/small/ratings")) == 4


def test_of_a_killed_server_the_answer_counts_that_a_rater_gives_again(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = context.store.root
    with monkeypatch.context() as killed:
        create = root.create

        def killing(path: str, data: bytes) -> bool:
            if path == "runs/small/ratings/0001.json":
                raise KeyboardInterrupt
            return create(path, data)

        killed.setattr(root, "create", killing)
        with pytest.raises(KeyboardInterrupt):
            answers(context, "ann", lambda left, right: 1.0, 1)
    answers(context, "ann", lambda left, right: 0.0, 1)
    assert len(root.list("runs/small/ratings")) == 2, "the first is completed"
    ((number, given),) = answers_of(context.run).items()
    assert given.preferred == 0.0
    withdraw_answer(context.run, number)
    assert answers_of(context.run) == {}


def test_an_answer_that_another_server_completes_is_stored_once(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = context.store.root
    create = root.create

    def completed(path: str, data: bytes) -> bool:
        created = create(path, data)
        if path.endswith("copies/0001.json"):
            assert create("runs/small/ratings/0001.json", data)
        return created

    monkeypatch.setattr(root, "create", completed)
    answers(context, "ann", lambda left, right: 1.0, 1)
    assert len(root.list("runs/small/ratings")) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"second_sample": "no-such"}, "has no sample 'no-such' of prompt"),
        ({"prompt_id": "other"}, "of prompt 'other'"),
        ({"preferred": 2.0}, "preferred"),
        ({"seconds": float("nan")}, "seconds"),
        ({"rater": "a\nb"}, "rater"),
        ({"first_artifact": "../x"}, "first_artifact"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_before_it_is_stored(
    context: RunContext, change: dict[str, Any], message: str
) -> None:
    answers(context, "ann", lambda left, right: 1.0, 1)
    (given,) = answers_of(context.run).values()
    with pytest.raises((StoreError, CorruptError), match=message):
        append_answer(context.run, replace(given, rater=change.pop("rater", "bob"), **change))
    assert len(context.store.root.list("runs/small/ratings")) == 1
    itself = {"first_artifact": given.second_artifact, "first_sample": given.second_sample}
    with pytest.raises(StoreError, match="cannot be compared with itself"):
        append_answer(context.run, replace(given, rater="bob", **itself))


def test_a_damaged_answer_is_found(context: RunContext, store: Path) -> None:
    answers(context, "ann", lambda left, right: 1.0, 2)
    record = store / "runs" / "small" / "ratings" / "0002.json"
    record.write_bytes(record.read_bytes().replace(b'"ann"', b'"bob"'))
    with pytest.raises(CorruptError, match="does not match its own checksum"):
        answers_of(RunFolder(context.store, "small"))
    assert "0002.json" in str(verify_store(context.store, deep=False)["problems"])


def pair(prompt: str, number: int, gap: float = 0.0) -> RatedGroup:
    key = (("evaluations/0a", f"{prompt}{number}"), ("evaluations/0b", f"{prompt}{number}"))
    return RatedGroup(key=key, prompt_id=prompt, prompt=prompt, gap=gap, draw=f"{number}{prompt}")


def order(pairs: list[RatedGroup]) -> list[str]:
    answered: list[Any] = []
    while (found := next_group(pairs, answered)) is not None:
        answered.append(found.key)
    return [key[0][1] for key in answered]


def test_every_prompt_comes_first_then_the_closest_scores() -> None:
    pairs = [pair("x", 1, 0.1), pair("x", 2, 0.2), pair("y", 1, 0.9), pair("y", 2, 0.3), pair("z", 1, float("inf"))]
    assert order(pairs) == ["x1", "y2", "z1", "x2", "y1"]
    # Without a scorer prompts take turns.
    assert order([pair(name, number) for name in "xy" for number in (1, 2)]) == ["x1", "y1", "x2", "y2"]


def test_pairs_of_two_evaluations_have_the_same_noise_and_fair_sides(context: RunContext) -> None:
    sources = compared(context)
    pairs = groups_of(sources, 0)
    seeds = [{row["sample_id"]: row["seed"] for row in table.to_pylist()} for table in _tables(context)]
    assert len(pairs) == 16
    assert all(seeds[0][one[1]] == seeds[1][other[1]] for one, other in (each.key for each in pairs))
    raters = [f"rater {number}" for number in range(40)]
    left = np.mean([order_of(each, rater)[0] == each.key[0] for each in pairs for rater in raters])
    assert abs(left - 0.5) < 4 * 0.5 / np.sqrt(640), "four standard deviations of a fair draw"
    assert [each.draw for each in groups_of(sources, 1)] != [each.draw for each in pairs]


def _tables(context: RunContext) -> list[Any]:
    from flowmill.tasks.metrics.view import RunView

    return [RunView(context).samples(epoch, evaluation=True) for epoch in (0, 1)]


def test_pairs_of_a_rollout_are_neighbors_by_score(context: RunContext) -> None:
    (source,) = sources_of(context, None, 1, evaluation=False, scorer="jpeg_compressibility")
    pairs = groups_of([source], 0)
    assert len(pairs) == 4 * 3, "groups of 4"
    scores = {row["sample_id"]: row["score"] for row in source.rows}
    for each in pairs:
        low, high = sorted(scores[sample] for _, sample in each.key)
        group = [row["score"] for row in source.rows if row["prompt_id"] == each.prompt_id]
        assert each.gap == high - low
        assert not [score for score in group if low < score < high]


def test_what_cannot_be_compared_is_a_message(context: RunContext) -> None:
    with pytest.raises(StoreError, match=r"--scorer: .* has no scores of 'jpg'.*jpeg_compressibility"):
        groups_of(sources_of(context, None, 1, evaluation=False, scorer="jpg"), 0)
    with pytest.raises(StoreError, match="share the artifact"):
        groups_of(sources_of(context, context, None, evaluation=False, scorer=None), 0)
    with pytest.raises(StoreError, match="no rollout for epoch 2 yet"):
        groups_of(sources_of(context, None, 2, evaluation=False, scorer=None), 0)
    for asking in (lambda: commit_preferences(context.run), lambda: rating_report(context)):
        with pytest.raises(StoreError, match=r"has no answers of raters yet. 'flowmill rate small --root "):
            asking()
    other = open_run(context.store.root.uri, "other", reads=True)
    with pytest.raises(StoreError, match="Run 'other' has 1 evaluations with samples to compare"):
        sources_of(other, None, None, evaluation=False, scorer=None)


def test_figures_of_a_run(context: RunContext) -> None:
    after = compared(context)[1].artifact
    pairs = answers(context, "ann", lambda left, right: float(left[0] == after))
    answers(context, "bob", lambda left, right: 1.0)
    report = rating_report(context)
    wins, by_score = report["wins"]
    assert (wins["winner"], wins["loser"]) == ("evaluation of epoch 1", "evaluation of epoch 0")
    assert (wins["prompts"], wins["answers"]) == (len({each.prompt_id for each in pairs}), 32)
    left = {each.key: order_of(each, "bob")[0][0] == after for each in pairs}
    by_prompt: dict[str, list[float]] = {}
    for each in pairs:
        by_prompt.setdefault(each.prompt_id, []).extend([1.0, float(left[each.key])])
    assert wins["rate"] == pytest.approx(np.mean([np.mean(shares) for shares in by_prompt.values()]))
    assert by_score["winner"] == "higher 'jpeg_compressibility'"
    ann, bob = report["raters"]
    assert (bob["rater"], bob["answers"], bob["left"]) == ("bob", 16, 1.0)
    assert ann["warning"] is None
    assert bob["warning"] == "always the left one, though sides are drawn: not about the samples"
    assert report["agreement"][0]["share"] == np.mean(list(left.values()))
    command = ["rate", "small", "--report", "--root", context.store.root.uri]
    said = CliRunner().invoke(app, command).output
    assert "evaluation of epoch 1\tevaluation of epoch 0\tall\t11\t32" in said
    assert "always the left one" in said
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).output) == {"run": "small", **report}


def test_two_runs_are_compared(context: RunContext) -> None:
    other = open_run(context.store.root.uri, "other", reads=True)
    sources = sources_of(context, other, None, evaluation=False, scorer=None)
    assert [source.artifact for source in sources] == [
        each.chain.require(1, "evaluate").artifact for each in (context, other)
    ]
    answers(context, "ann", lambda left, right: float(left[0] == sources[1].artifact), sources=sources)
    wins = rating_report(context)["wins"][0]
    assert (wins["winner"], wins["loser"]) == ("other, evaluation of epoch 1", "evaluation of epoch 1")
    assert (wins["answers"], wins["rate"]) == (16, 1.0)


def test_the_reward_that_people_agree_with_wins(context: RunContext) -> None:
    sources = compared(context)
    scored = sources_of(context, None, None, evaluation=False, scorer="jpeg_compressibility")
    scores = {(source.artifact, row["sample_id"]): row["score"] for source in scored for row in source.rows}
    assert len({source.artifact for source in sources}) == 2
    answers(context, "ann", lambda left, right: float(scores[left] > scores[right]))
    assert [row["rate"] for row in rating_report(context)["wins"]][1:] == [1.0]


def test_prompts_count_equally_in_a_win_rate_and_sources_apart() -> None:
    shares = [(f"p{number}", float(number < 15)) for number in range(20)] + [("p0", 0.0), ("p0", 0.5)]
    sources = {f"p{number}": "odd" if number % 2 else "even" for number in range(20)}
    everything, even, odd = win_rates("new", "old", shares, sources)
    assert (everything["source"], everything["prompts"], everything["answers"]) == ("all", 20, 22)
    assert everything["rate"] == pytest.approx((14 + 0.5) / 20), "the three answers to p0 are one prompt's"
    assert [(each["source"], each["prompts"], each["answers"]) for each in (even, odd)] == [
        ("even", 10, 12),
        ("odd", 10, 10),
    ]
    assert odd["rate"] == 0.7
    assert odd["low"] == pytest.approx(0.3968, abs=1e-4)
    (wilson,) = win_rates("new", "old", shares[:20], {})
    assert (wilson["low"], wilson["high"]) == (pytest.approx(0.5313, abs=1e-4), pytest.approx(0.8881, abs=1e-4))


def test_kappa_is_the_published_one() -> None:
    """Fleiss 1971 as in its best known example: 10 subjects, 14 raters, 5 categories, kappa 0.210."""
    counts = [
        (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
        (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
    ]  # fmt: skip
    votes = np.array([np.repeat(range(5), row) for row in counts])
    share, chance = agreement_of(votes)
    assert (round(share, 3), round(chance, 3)) == (0.378, 0.213)
    assert (share - chance) / (1 - chance) == pytest.approx(0.210, abs=5e-4)
    two = np.random.default_rng(0).choice([0.0, 0.5, 1.0], (50, 2))
    share, chance = agreement_of(two)
    assert (share - chance) / (1 - chance) == pytest.approx(cohen_kappa_score(*(two * 2).astype(int).T))


def test_agreement_counts_common_pairs_whatever_their_sides() -> None:
    turned = replace(
        answer(0.0, rater="bob"), first_artifact="evaluations/0b", second_artifact="evaluations/0a"
    )  # fmt: skip
    (found,) = agreements([answer(1.0), answer(1.0, sample="only ann's"), turned])
    assert found == {"raters": "ann, bob", "pairs": 1, "share": 1.0, "kappa": None}
    assert agreements([answer(), answer(rater="bob", sample="another")]) == []
    three = agreements([answer(), answer(rater="bob"), answer(0.5, rater="cy")])
    assert [each["raters"] for each in three] == ["ann, bob", "ann, cy", "bob, cy", "ann, bob, cy"]
    assert three[-1]["share"] == pytest.approx(1 / 3)
