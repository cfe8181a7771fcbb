"""Turns: after each image a language model reads a comment on it, and writes another text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml

from flowmill.configs.errors import ConfigError, StoreError
from flowmill.configs.load import load_config
from flowmill.configs.render import TurnsSection
from flowmill.configs.schema import RunConfig
from flowmill.configs.tokens import TokensSection
from flowmill.models.quickstart.addition import character_tokenizer
from flowmill.models.rewards.base import declare
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.renderer import SEEN_KEY, TURN_KEY, turn_in
from flowmill.tasks.metrics.evaluations import evaluated_epochs, evaluation_figures, named_evaluations
from flowmill.tasks.metrics.samples import rows_of, stored_sample
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.tokens.modality import Tokens
from flowmill.tasks.modalities.tokens.prompts import Prompts
from flowmill.tasks.modalities.tokens.run_prompts import Comments, read_prompts
from flowmill.tasks.modalities.tokens.text import FINISHES
from flowmill.tasks.reports.report.reading import read_run
from flowmill.tasks.reports.trace import trace_sample
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.staleness import side_results
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.plan import RunPlan
from tests.support.inside import evaluate, make_stage, prepare, run_epoch, stage_rows, stage_run, summary_of
from tests.support.language_models import drawn_texts_data, texts_config
from tests.support.vision_classes import drawn_vision_data


@declare(media="images")
def level(media: Any, prompts: Any, metadata: Any) -> list[float]:
    """Return a number of two digits for each image, which says nothing of it."""
    return [float(10 + round(float(image.std()) * 7919) % 80) for image in media]


def config_of(folder: Path, base: Path, *overrides: str) -> RunConfig:
    """Return a config of up to three turns; random texts of four characters often hold the sign that ends them."""
    path = folder / "texts.yaml"
    if not path.exists():
        data = drawn_texts_data(folder, base)
        data["render"]["turns"] = {"count": 3, "comment": "{score}", "comment_tokens": 2, "done": "7", "cost": 0.5}
        data["rewards"] = [{"name": f"{__name__}:level", "label": "level"}]
        data["rollout"]["tokens"]["evaluate"] = "sampled"
        path.write_text(yaml.safe_dump(data))
    return load_config(path, overrides)


def samples(context: RunContext, stage: str, turn: int) -> dict[str, Sample]:
    ref = context.chain.require(1, stage, "" if turn == 3 else f"#{turn}").ref
    return {name: stored_sample(shard, row) for name, shard, row in rows_of(context.store, ref, None)}


def scores_of(context: RunContext, slot: str) -> dict[str, float | None]:
    rows = stage_rows(context, 1, "score", slot).to_pylist()
    return {row["sample_id"]: row["reward"] for row in rows}


def written(sample: Sample) -> str:
    assert sample.text is not None
    return bytes(sample.text).decode()


def test_a_conversation_goes_on_until_a_text_ends_it(tiny_base: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_base)
    cost, alone = (check_config(each) for each in (config, config_of(tmp_path, tiny_base, "render.turns=null")))
    assert (cost.rollout_forwards, cost.drawing_forwards) == (3 * alone.rollout_forwards, 3 * alone.drawing_forwards)
    of_epoch = [f"{node.stage}{node.slot}" for node in RunPlan(config).nodes() if node.epoch == 1]
    turns = [f"{name}#{number}" for number in (1, 2) for name in ("rollout", "render", "scorelevel")]
    assert of_epoch[:8] == [*turns, "rollout", "render"]
    context = prepare(config)
    run_epoch(context, 1)
    texts, images = ({turn: samples(context, stage, turn) for turn in (1, 2, 3)} for stage in ("rollout", "render"))
    for name, first in texts[1].items():
        assert TURN_KEY not in first.metadata
        for turn in (2, 3):
            before, now = texts[turn - 1][name], texts[turn][name]
            if turn_in(before.metadata) < turn - 1 or "7" in written(before):
                _check_equal(now, before)
                _check_equal(images[turn][name], images[turn - 1][name])
            else:
                score = scores_of(context, f"level#{turn - 1}")[name]
                assert score is not None
                _check_said(before, now, f"{score:.2f}")
                assert now.metadata == {**first.metadata, TURN_KEY: turn}
                # A text of nothing but the mark keeps the image.
                assert (images[turn][name].metadata == now.metadata) is (written(now).strip() != "7")
    lengths = {name: turn_in(sample.metadata) for name, sample in texts[3].items()}
    assert set(lengths.values()) == {1, 2, 3}
    assert {name: np.size(sample.finish) for name, sample in texts[3].items()} == lengths
    # The image that counts is the last, less the cost of those before; images that are not new are not scored again.
    drawn, scored = {name: turn_in(each.metadata) for name, each in images[3].items()}, scores_of(context, "level")
    assert [name for name, value in scores_of(context, "level#2").items() if value is not None] == [
        name for name in drawn if turn_in(images[2][name].metadata) == 2
    ]
    earned = stage_rows(context, 1, "advantage").to_pylist()
    expected = {name: value - 0.5 * (drawn[name] - 1) for name, value in scored.items() if value is not None}
    assert {row["sample_id"]: row["reward"] for row in earned} == pytest.approx(expected, rel=1e-6)
    _check_shown(context, lengths)


def _check_equal(now: Sample, before: Sample) -> None:
    assert now.metadata == before.metadata
    assert {**now.arrays(), "log_probs": now.log_probs}.keys() == {**before.arrays(), "log_probs": 0}.keys()
    for name, array in {**now.arrays(), "log_probs": now.log_probs, "media": now.media}.items():
        np.testing.assert_array_equal(
            array, {**before.arrays(), "log_probs": before.log_probs, "media": before.media}[name]
        )


def _check_said(before: Sample, now: Sample, comment: str) -> None:
    """Check that a row goes on with a comment, which is not trained on, and another text, which is."""
    assert before.tokens is not None
    assert now.tokens is not None
    assert now.token_mask is not None
    start, new = len(before.tokens), len(now.log_probs) - len(before.log_probs)
    tokenizer, said = character_tokenizer(), now.tokens[start : len(now.tokens) - new]
    assert said.tolist() == tokenizer(comment, add_special_tokens=False).input_ids[:2]
    np.testing.assert_array_equal(now.tokens[:start], before.tokens)
    np.testing.assert_array_equal(now.token_mask, [*before.token_mask, *[0] * len(said), *[1] * new])  # type: ignore[misc]
    # Equal up to the rounding of rows of other lengths.
    np.testing.assert_allclose(now.log_probs[: len(before.log_probs)], before.log_probs, atol=1e-5)


def _check_shown(context: RunContext, lengths: Mapping[str, int]) -> None:
    rows = RunView(context).turns(1).to_pylist()
    assert [row["sample_id"] for row in rows] == [name for name, count in lengths.items() for _ in range(count)]
    name = next(name for name, count in lengths.items() if count == 3)
    ref = context.chain.require(1, "rollout").ref
    traced = trace_sample(context.store, ref, name, [context])["runs"]["texts"]["turns"]
    assert [row["turn"] for row in traced] == [1, 2, 3]
    assert traced[0]["reward"] == scores_of(context, "level#1")[name]
    report = read_run(context)
    assert "reward/level_turn1_mean" in report.curves
    assert any("\n" in (shot.text or "") for shot in (*report.best, *report.worst))


@pytest.mark.slow
def test_turns_depend_on_no_shard_and_an_interrupted_one_goes_on(tiny_base: Path, tmp_path: Path) -> None:
    digests = []
    for groups in (1, 3):
        sizes = (f"store.root={tmp_path / str(groups)}", f"rollout.groups_per_shard={groups}", "render.turns.count=2")
        context = prepare(config_of(tmp_path, tiny_base, *sizes))
        for node in context.plan.scored(1):
            if groups == 1:
                # A process makes one shard of each stage, and is killed.
                run = stage_run(context, node.stage, 1, node.slot)
                run.run_shard(next(iter(run.pending())))
                context = RunContext(context.store, context.config, context.run)
            run = stage_run(context, node.stage, 1, node.slot)
            assert len(run.pending()) == (3 if groups == 1 else 2)
            run.execute()
        digests.append(context.chain.digest())
    assert digests[0] == digests[1]
    evaluate(context, 0)
    assert evaluated_epochs(context.chain) == [0]
    assert set(evaluation_figures(context.chain, 0)["train"]) == {"level"}
    turns = RunView(context).turns(0, evaluation=True)
    assert turns.column("turn").to_pylist().count(1) == 8, "samples of both lists"
    assert turns.column("turn").to_pylist().count(2) > 0
    evaluate(context, 0, "other")
    assert set(named_evaluations(context.chain)) == {(0, "other")}
    assert {side.label for side in side_results(context.chain)} == {"evaluation 'other'"}
    # Another comment is another second turn.
    other = RunContext(
        context.store, config_of(tmp_path, tiny_base, *sizes, "render.turns.comment=n{score}"), context.run
    )
    for slot, same in (("#1", True), ("", False)):
        nodes = [each.chain.target(Node(1, "rollout", slot)) for each in (context, other)]
        assert (nodes[0] == nodes[1]) is same


def test_a_model_sees_the_images_of_earlier_turns(tiny_base: Path, tmp_path: Path) -> None:
    path = tmp_path / "seen.yaml"
    path.write_text(yaml.safe_dump(drawn_vision_data(tmp_path, tiny_base)))
    with pytest.raises(ConfigError, match=r"may have 2 images, 0 of the prompt and 2 drawn, but .* takes 1"):
        check_config(load_config(path, ["model.options.images=1"]))
    # With a critic, whose stage reads the images too.
    config = load_config(path, ["optimize.algorithm=ppo"])
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    (first, *_) = summary_of(context, 1, "optimize")["updates"]
    assert first["replay_gap_max"] == first["ratio_std"] == 0.0
    read = read_prompts(context)
    pictures = read.prompts.pictures
    assert pictures is not None
    assert read.seen is not None
    texts, images = ({turn: samples(context, stage, turn) for turn in (1, 2, 3)} for stage in ("rollout", "render"))
    went_on = [name for name, sample in texts[3].items() if turn_in(sample.metadata) == 3]
    assert went_on
    for name in went_on:
        sample = texts[3][name]
        assert sample.tokens is not None
        row = read.with_images(sample.prompt_id, sample.tokens, lambda each=sample: (each.sample_id, each.metadata))  # type: ignore[misc]
        # The processor's inputs of both images, in order; stored rows have the model's own token.
        numbers = pictures.of_row(list(row))
        for number, turn in zip(numbers, (1, 2), strict=True):
            media = images[turn][name].media
            assert media is not None
            wanted = pictures.inputs(pictures.number(f"again {turn} {name}", lambda media=media: media))  # type: ignore[misc]
            assert all(torch.equal(value, wanted[key]) for key, value in pictures.inputs(number).items())
        assert list(sample.tokens) == pictures.stored(row)
        assert sample.token_mask is not None
        assert not any(token < 0 and chosen for token, chosen in zip(row, sample.token_mask, strict=True))
        # Without a comment, texts differ by the seen images alone.
        assert sample.metadata[SEEN_KEY] == [str(context.chain.require(1, "render", slot).ref) for slot in ("#1", "#2")]


@pytest.mark.campaign
@pytest.mark.slow
def test_two_ranks_see_as_one(tiny_base: Path, tmp_path: Path, flowmill: Callable[..., Any]) -> None:
    path, made = tmp_path / "seen.yaml", []
    path.write_text(yaml.safe_dump(drawn_vision_data(tmp_path, tiny_base)))
    for ranks in (1, 2):
        settings = ["run.epochs=1", f"store.root={tmp_path / str(ranks)}", f"execution.processes={ranks}"]
        done = flowmill("run", str(path), "--quiet", *(part for each in settings for part in ("--set", each)))
        assert done.returncode == 0, done.stderr
        config = load_config(path, settings)
        store = ArtifactStore(config.store)
        context = RunContext(store, config, RunFolder(store, config.run.name))
        refs = [context.chain.require(*node).ref for node in [*context.plan.scored(1), Node(1, "optimize")]]
        made.append([store.require(ref).content for ref in refs[:-1]])
        (first, *_) = store.require(refs[-1]).summary["updates"]
        assert first["replay_gap_max"] == 0.0
    assert made[0] == made[1]


def test_prompts_cannot_say_which_turn_they_are(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "turned.jsonl").write_text('{"prompt": "1+2=", "answer": "3", "render_turn": 2}\n')
    with pytest.raises(ConfigError, match=r"prompts\.train has a column 'render_turn'"):
        check_config(config_of(tmp_path, tiny_base, f"prompts.train={tmp_path}/turned.jsonl"))


def test_a_stage_has_the_turns_of_its_run(tiny_base: Path, tmp_path: Path) -> None:
    context = prepare(config_of(tmp_path, tiny_base))
    for slot in ("#3", "#0", "#x", "level#3"):
        with pytest.raises(ConfigError, match=f"has no '{slot}'"):
            make_stage(context, "score" if slot[0] != "#" else "render", 1, slot)
    alone = prepare(config_of(tmp_path, tiny_base, "render.turns=null", "run.name=alone"))
    with pytest.raises(StoreError, match="no turns"):
        RunView(alone).turns(1)


def test_a_comment_is_a_message_of_the_user_and_cannot_end_it() -> None:
    tokenizer = character_tokenizer()
    plain = Comments(Prompts(tokenizer, TokensSection(), None), TurnsSection(comment_tokens=3))
    assert (plain.after([5, 2], "1+2+3"), plain.most()) == (tokenizer("1+2", add_special_tokens=False).input_ids, 3)
    # An answer ends with <eos>, a message with '='.
    tokenizer.chat_template = (
        "{% for each in messages %}{% if each.role == 'user' %}+{{ each.content }}={% else %}{{ each.content }}<eos>"
        "{% endif %}{% endfor %}"
    )
    chat = Comments(Prompts(tokenizer, TokensSection(), None), TurnsSection(comment_tokens=3))
    goes_on = tokenizer("<eos>+12=", add_special_tokens=False).input_ids
    assert chat.after([5], "12") == goes_on
    assert chat.after([5, tokenizer.eos_token_id], "12") == goes_on[1:]
    assert tokenizer.eos_token_id not in chat.after([tokenizer.eos_token_id], "1<eos>2")
    assert chat.most() == 3 + 3
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ConfigError, match="cannot go on after an answer"):
        Comments(Prompts(tokenizer, TokensSection(), None), TurnsSection())


def test_a_comment_holds_remark_and_score_and_a_mark_is_not_drawn(tiny_base: Path, tmp_path: Path) -> None:
    turns = TurnsSection(comment="It shows {note}: {score}", done="DONE")
    assert turns.said("{score}", 0.256) == "It shows {score}: 0.26"
    assert turns.said("", None) == "It shows : "
    assert [turns.ends(text) for text in ("a cat DONE", "done")] == [True, False]
    render = config_of(tmp_path, tiny_base).render
    assert render is not None
    section = render.model_copy(update={"turns": turns})
    assert [section.drawn(text) for text in ("a cat DONE", "DONE")] == ["a cat", ""]


def test_a_turn_that_was_truncated_is_found_whatever_the_others(tmp_path: Path) -> None:
    config, shard = texts_config(tmp_path), Mock()
    # Tokens of two prompts, of a first turn, of a comment and of a second turn; at most 4 a turn.
    for first, second, finishes, truncated in (
        *((4, 1, ["eos"], True), (3, 4, ["length"], True), (3, 4, ["eos"], False), (1, 3, ["stop"], False)),
        *((0, 4, ["eos"], False), (0, 4, ["length"], True)),
        # With the end of each turn, which may be the last token that fits.
        *((4, 1, ["eos", "eos"], False), (4, 1, ["stop", "eos"], False), (4, 1, ["length", "eos"], True)),
        (3, 4, ["eos", "length"], True),
    ):
        arrays = {"token_mask": np.repeat([0, 1, 0, 1], [2, first, 3, second]).astype(np.uint8)}
        arrays["finish"] = np.array([FINISHES.index(each) for each in finishes], np.uint8)
        shard.array = lambda name, row, arrays=arrays: arrays[name]
        assert Tokens().truncated(config, shard, 0) == truncated


def test_samples_that_are_left_out_do_not_return_in_running_statistics(tmp_path: Path) -> None:
    settings = ["advantage.std=running", "advantage.buffer=64", "advantage.min_count=1", "run.epochs=2"]
    settings += ["advantage.overlong={buffer: 1, factor: 0, exclude: true}", "rollout.prompts_per_epoch=10"]
    context = prepare(texts_config(tmp_path, *settings))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    first, second = (stage_rows(context, epoch, "advantage").to_pylist() for epoch in (1, 2))
    assert any(row["reward"] is None for row in first)
    for row in filter(lambda row: row["reward"] is not None, second):
        pool = [each["reward"] for each in (*first, *second) if each["prompt_id"] == row["prompt_id"]]
        rewards = np.array([reward for reward in pool if reward is not None])
        expected = (row["reward"] - rewards.mean()) / (rewards.std() + 1e-4) if rewards.std() > 1e-6 else 0
        assert row["advantage"] == pytest.approx(np.clip(expected, -5, 5), abs=1e-4)
