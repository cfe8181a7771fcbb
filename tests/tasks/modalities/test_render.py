"""A language model whose texts a frozen image model draws: stages, rewards of images, and who learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.model import ModelSection
from flowmill.configs.render import RenderSection
from flowmill.configs.schema import RunConfig
from flowmill.configs.tokens import TokensSection
from flowmill.models.quickstart.addition import character_tokenizer
from flowmill.storage.artifacts.records import Manifest
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.metrics.evaluations import evaluation_figures, evaluation_grids
from flowmill.tasks.metrics.samples import artifact_table, media_of
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.tokens.exporting import call_of
from flowmill.tasks.modalities.tokens.prompts import Prompts
from flowmill.tasks.reports.dataset import export_run
from flowmill.tasks.reports.report.reading import read_run
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.runs.staleness import side_results
from flowmill.tasks.specs.graph import RENDERER, Node
from flowmill.tasks.specs.plan import RunPlan
from tests.support.inside import (
    Make,
    evaluate,
    evaluation_texts,
    make_stage,
    prepare,
    run_epoch,
    run_stage,
    stage_run,
    train,
)
from tests.support.language_models import drawn_texts_data

REWARD = "jpeg_compressibility"


def config_of(folder: Path, base: Path, *overrides: str) -> RunConfig:
    path = folder / "texts.yaml"
    if not path.exists():
        path.write_text(yaml.safe_dump(drawn_texts_data(folder, base)))
    return load_config(path, overrides)


def made(context: RunContext, stage: str, slot: str = "", epoch: int = 1) -> str:
    return context.chain.require(epoch, stage, slot).artifact


def written_of(images: pa.Table) -> list[str]:
    return [str(text) for text in images.column("text").to_pylist()]


def test_images_are_drawn_of_texts_scored_for_the_prompt_and_shown_with_both(tiny_base: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_base)
    check_config(config)
    nodes = list(RunPlan(config).nodes())
    assert nodes[:2] == [Node(0, "base"), Node(0, "base", RENDERER)]
    of_epoch = [node.stage for node in nodes if node.epoch == 1]
    assert of_epoch[:6] == ["rollout", "render", "score", "score", "advantage", "optimize"]
    context = prepare(config)
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    store = context.store
    texts = artifact_table(store, context.chain.require(1, "rollout").ref)
    images = artifact_table(store, context.chain.require(1, "render").ref)
    for column in ("sample_id", "prompt", "metadata", "group_id", "replica"):
        assert images.column(column) == texts.column(column), column
    assert written_of(images) == [text.strip() for text in texts.column("text").to_pylist()]
    # Texts of a prompt are drawn from one noise, those of others from another.
    seeds = dict(zip(images.column("prompt_id").to_pylist(), images.column("seed").to_pylist(), strict=True))
    assert len(set(seeds.values())) == len(seeds) == len(set(images.column("seed").to_pylist())) == 4
    media = media_of(store, context.chain.require(1, "render").ref)
    assert {each.shape for each in media.values()} == {(16, 32, 3)}
    scores = read_rows(store, context.chain.require(1, "score", REWARD).ref)
    assert scores.column("sample_id") == texts.column("sample_id")
    assert len(set(scores.column("reward").to_pylist())) > 1
    # What a person sees.
    grids, shown = evaluation_grids(context.chain, 1), evaluation_texts(context, 1)
    assert set(grids) == set(shown) == {"train", "heldout"}
    assert [each.prompt for each in shown["heldout"]] == [prompt.text for prompt in context.prompts["heldout"]]
    assert "digits" not in evaluation_figures(context.chain, 1)["train"], "it is a monitor"
    report = read_run(context)
    assert report.curves["render/empty_ratio"][0][1] == pytest.approx(sum(not each for each in written_of(images)) / 16)
    assert report.best
    assert all(shot.image is not None and shot.text is not None for shot in (*report.best, *report.worst))
    assert set(RunView(context).samples(1).column("media_format").to_pylist()) == {"png"}
    found = RunView(context).pictures(1, [texts.column("sample_id")[0].as_py()])
    np.testing.assert_array_equal(next(iter(found.values())), media[next(iter(found))])
    export_run(context, tmp_path / "out", "datasets", epochs=[1], progress=lambda done, total: None)
    written = pq.read_table(tmp_path / "out" / "train-00001.parquet").to_pylist()
    assert [row["text"] for row in written] == texts.column("text").to_pylist()
    assert all(row["image"]["bytes"][1:4] == b"PNG" for row in written)
    evaluate(context, 1, "other")
    assert {side.label for side in side_results(context.chain)} == {"evaluation 'other'"}, "its images too"


def test_what_is_drawn_already_is_scored_anew_and_what_is_written_drawn_anew(tiny_base: Path, tmp_path: Path) -> None:
    plain = prepare(config_of(tmp_path, tiny_base))
    run_epoch(plain, 1)
    kept = {
        "rewards=[{name: jpeg_incompressibility}]": ("rollout", "render"),
        "render.steps=3": ("rollout",),
        "render.same_noise=false": ("rollout",),
        "rollout.tokens.instruction='1+{prompt}'": (),
    }
    for number, (override, same) in enumerate(kept.items()):
        context = prepare(config_of(tmp_path, tiny_base, f"run.name=other{number}", override))
        slot = context.config.rewards[0].slot
        for node in (Node(1, "rollout"), Node(1, "render"), Node(1, "score", slot)):
            run = stage_run(context, node.stage, 1, node.slot)
            assert (run.pending() == []) == (node.stage in same), (override, node)
            run.execute()
    assert plain.store.root.list("bases"), "and all draw with one model"
    assert len(plain.store.root.list("bases")) == 2


def test_images_depend_on_no_shard_and_several_of_a_text_count_as_one(tiny_base: Path, tmp_path: Path) -> None:
    digests = []
    for groups in (1, 3):
        root = tmp_path / f"store{groups}"
        several = ("render.images=2", "render.same_noise=false", "execution.render_rows=5")
        context = prepare(
            config_of(tmp_path, tiny_base, f"store.root={root}", f"rollout.groups_per_shard={groups}", *several)
        )
        run_epoch(context, 1)
        evaluate(context, 1)
        digests.append(context.chain.digest())
    assert digests[0] == digests[1]
    store = context.store
    texts, drawn = (artifact_table(store, context.chain.require(1, stage).ref) for stage in ("rollout", "render"))
    ids = texts.column("sample_id").to_pylist()
    assert drawn.column("sample_id").to_pylist() == [f"{each}-i{number:02d}" for each in ids for number in (0, 1)]
    assert len(set(drawn.column("seed").to_pylist())) == len(drawn)
    found = read_rows(store, context.chain.require(1, "score", REWARD).ref)
    assert found.column("sample_id").to_pylist() == ids
    reward = make_stage(context, "score", 1, REWARD).host.rewards.of(context.config.rewards[0])
    media = np.stack([*media_of(store, context.chain.require(1, "render").ref).values()])
    each: Any = reward.score(media, [""] * len(media), [{}] * len(media))
    np.testing.assert_allclose(
        found.column("reward").to_numpy(), np.asarray(each.values, np.float32).reshape(-1, 2).mean(1), rtol=1e-6
    )
    pictures = RunView(context).pictures(1, ids[:1])
    assert {name: images.shape for name, images in pictures.items()} == {ids[0]: (2, 16, 32, 3)}
    advantages = read_rows(store, context.chain.require(1, "advantage").ref)
    assert advantages.column("sample_id").to_pylist() == ids


def test_what_an_interrupted_stage_has_drawn_stays_and_the_rest_is_equal(tiny_base: Path, tmp_path: Path) -> None:
    manifests = []
    for name in ("whole", "stopped"):
        context = prepare(config_of(tmp_path, tiny_base, f"store.root={tmp_path / name}"))
        run_stage(context, "rollout", 1)
        run = stage_run(context, "render", 1)
        if name == "stopped":
            first, *_ = run.pending()
            run.run_shard(first)
            context = prepare(context.config)
            run = stage_run(context, "render", 1)
            assert [shard.name for shard in run.pending()] == ["000002-000004"]
        manifest = run.execute()
        assert manifest is not None
        assert dict(manifest.summary) == {"images": 16, "empty": manifest.summary["empty"]}
        manifests.append(manifest.digest)
    assert manifests[0] == manifests[1]


def test_the_model_that_draws_is_loaded_once_and_leaves_when_told(tiny_base: Path, tmp_path: Path) -> None:
    context = prepare(config_of(tmp_path, tiny_base))
    run_epoch(context, 1)
    host = make_stage(context, "render", 1).host
    assert host.renderer is not None
    assert host.loaded()["renderer"] == host.renderer.loaded() > 0
    held = host.renderer.policy()
    assert not any(weight.grad is not None for module in held.modules().values() for weight in module.parameters())
    run_epoch(context, 2)
    assert host.renderer.policy() is held
    host.release()
    assert host.renderer.loaded() == 0


def test_a_model_of_images_draws_nothing_of_others(make_config: Make) -> None:
    config = make_config()
    render = RenderSection(model=config.model)
    with pytest.raises(ConfigError, match=r"render draws texts, but model\.policy 'sd3' writes none"):
        check_config(config.model_copy(update={"render": render}))


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        (" a cat \n", "a cat"),
        ("<a>one</a><a> two </a> and so on", "two"),
        ("no marks", ""),
        ("<a>never closed", ""),
        ("closed</a>", ""),
        ("<a></a>", ""),
        ("<a>one</a> stands between <a> marks", "one"),
        ("<a>one <a>two</a>", "two"),
        ("<a>one</a> ends with </a>", "one"),
    ],
)
def test_what_stands_between_marks_is_drawn(text: str, drawn: str) -> None:
    model = ModelSection(policy="sd3", path="somewhere")
    section = RenderSection(model=model, answer=("<a>", "</a>") if "a>" in text or not drawn else None)
    assert section.drawn(text) == drawn


def test_instructions_hold_the_prompt_and_cards_the_whole_call() -> None:
    tokenizer = character_tokenizer()
    asked = Prompts(tokenizer, TokensSection(instruction="1+{prompt}="), None)
    assert asked.ids("2") == tokenizer("1+2=").input_ids
    assert call_of(asked) == 'inputs = tokenizer("1+...=", return_tensors="pt")'
    with pytest.raises(ValueError, match=r"has no \{prompt\}"):
        TokensSection(instruction="Add.")
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    chat = Prompts(tokenizer, TokensSection(system="0", instruction="1+{prompt}"), None)
    assert chat.ids("2") == tokenizer.convert_tokens_to_ids(list("01+2"))
    scope: dict[str, Any] = {"tokenizer": tokenizer}
    exec(call_of(chat).replace("...", "2"), scope)
    assert scope["inputs"]["input_ids"].tolist() == [chat.ids("2")]
    # A date that was set is in the call, and an end that was left off is left off.
    tokenizer.chat_template = "{{ strftime_now('%d') }}{{ strftime_now('%Y') }}{{ messages[-1].content }}"
    dated = Prompts(tokenizer, TokensSection(template_date=date(2024, 7, 26)), None)
    assert dated.ids("2") == tokenizer.convert_tokens_to_ids(list("2620242"))
    exec(call_of(dated).replace("...", "2"), scope)
    assert scope["inputs"]["input_ids"].tolist() == [dated.ids("2")]
    ending = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    ending.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 2)])
    bare = Prompts(ending, TokensSection(), None)
    scope = {"tokenizer": ending}
    exec(call_of(bare).replace("...", "1+2"), scope)
    assert scope["inputs"]["input_ids"].tolist() == [bare.ids("1+2")] == [tokenizer.convert_tokens_to_ids(list("1+2"))]


def manifest_of(root: Path, stage: str, slot: str) -> Manifest:
    context = open_run(str(root), "texts", reads=True)
    return context.store.require(context.chain.require(1, stage, slot).ref)


@pytest.mark.campaign
@pytest.mark.slow
def test_a_run_of_the_command_draws_two_turns_and_shows(
    tiny_base: Path, tmp_path: Path, flowmill: Callable[..., Any]
) -> None:
    config_of(tmp_path, tiny_base)
    settings = (
        "--set",
        "run.epochs=1",
        "--set",
        "render.turns={count: 2, comment: '{score}', comment_tokens: 3, done: '1'}",
    )
    done = flowmill("run", str(tmp_path / "texts.yaml"), "--quiet", *settings)
    assert done.returncode == 0, done.stderr
    local = ("texts", "--root", str(tmp_path / "store"))
    states = json.loads(flowmill("status", *local, "--json").stdout)
    assert "stale" not in json.dumps(states).replace('"stale": []', "").replace('"stale": 0', "")
    report = flowmill("report", *local, "--out", str(tmp_path / "report.html"))
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "report.html").read_text().count("<figure>") >= 2
    ranks = ("--root", str(tmp_path / "ranks"), "--set", "execution.processes=2", "--set", "execution.strategy=fsdp")
    together = flowmill("run", str(tmp_path / "texts.yaml"), "--quiet", *settings, *ranks)
    assert together.returncode == 0, together.stderr
    for stage, slot in (("rollout", "#1"), ("render", "#1"), ("rollout", ""), ("render", "")):
        drawn = [manifest_of(tmp_path / name, stage, slot).content for name in ("store", "ranks")]
        assert drawn[0] == drawn[1]
    again = flowmill("stage", "depict", "--run", *local, "--epoch", "1")
    assert again.returncode == 0, again.stderr


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_the_tiny_enhancer_learns_how_its_image_model_is_asked(tmp_path: Path) -> None:
    context = train(load_config("tiny_enhancer", ["run.epochs=10", f"store.root={tmp_path}"]))
    before, after = (evaluation_figures(context.chain, epoch)["heldout"]["digits"]["mean"] for epoch in (0, 10))
    assert before < 0.45
    assert after > before + 0.25
    assert Image.open(evaluation_grids(context.chain, 10)["heldout"]).width > 500
