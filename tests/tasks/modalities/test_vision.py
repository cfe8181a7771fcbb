"""Runs of vision-language models: images are stored once, replayed exactly, shown to rewards, and checked early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from PIL import Image
from pyarrow import parquet

from flowmill.configs.errors import ConfigError, DataError, FlowmillError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.vision_lm import VisionLM
from flowmill.models.rewards.base import declare
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.metrics.tracked import evaluation_content
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.tokens.run_prompts import read_prompts
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.runs.context import RunContext
from tests.support.cards import assert_repository
from tests.support.inside import evaluate, prepare, run_epoch, run_stage, session_of, stored_shards, updates_of
from tests.support.vision_classes import vision_data


def config_of(folder: Path, *overrides: str, **rollout: Any) -> RunConfig:
    path = folder / "vision.yaml"
    if not path.exists():
        path.write_text(yaml.safe_dump(vision_data(folder, **rollout)))
    return load_config(path, overrides)


def texts_of(context: RunContext, epoch: int) -> dict[str, Any]:
    return {
        name: (shard.text(row), shard.array("tokens", row).tolist(), shard.table["log_probs"][row].as_py())
        for shard in stored_shards(context, epoch, "rollout")
        for row, name in enumerate(shard.table["sample_id"].to_pylist())
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    folder = tmp_path_factory.mktemp("vision")
    context = prepare(config_of(folder, "model.lora={rank: 2, targets: [q_proj, down_proj]}"))
    evaluate(context, 0)
    for epoch in (1, 2):
        run_epoch(context, epoch)
    evaluate(context, 2)
    run_stage(context, "export", 2)
    return context


def test_replay_is_exact_on_a_quantized_base(tmp_path: Path) -> None:
    lora, quantize = "model.lora={rank: 2, targets: [q_proj, down_proj]}", "model.quantize={name: int8}"
    context = prepare(config_of(tmp_path, lora, quantize))
    run_epoch(context, 1)
    first, *_ = updates_of(context, 1)
    assert first["replay_gap_max"] == 0.0
    assert first["ratio_mean"] == 1.0
    assert first["grad_norm"] > 0


def test_replay_is_exact_in_float32(trained: RunContext) -> None:
    for epoch in (1, 2):
        first, *_ = updates_of(trained, epoch)
        assert first["replay_gap_max"] == 0.0
        assert first["ratio_std"] == 0.0
        assert 0 < first["sampler_gap"] < 1e-5


def test_rows_have_the_processors_own_tokens_and_images_are_stored_once(trained: RunContext) -> None:
    read = read_prompts(trained).prompts
    token = read.pictures.token if read.pictures is not None else 0
    for text, tokens, log_probs in texts_of(trained, 1).values():
        assert min(tokens) >= 0
        assert token in tokens
        assert len(log_probs) <= 4
        assert isinstance(text, str)
    keys = {key for prompt in trained.prompts_by_id.values() for key in prompt.metadata["image_xxh3"].split(",")}
    assert len(keys) == 5
    assert len(trained._reference_files._places) == 5


def test_shards_and_batches_change_nothing(trained: RunContext, tmp_path: Path) -> None:
    folder = Path(str(trained.config.model.path)).parent
    other = config_of(
        folder,
        "model.lora={rank: 2, targets: [q_proj, down_proj]}",
        f"store.root={tmp_path}",
        "rollout.groups_per_shard=1",
        "execution.micro_batch_size=4",
    )
    context = prepare(other)
    run_epoch(context, 1)
    assert texts_of(context, 1) == texts_of(trained, 1)


def test_an_image_is_seen_upright_and_its_content_counts(tmp_path: Path) -> None:
    data = vision_data(tmp_path)
    pixels = np.asarray(Image.open(tmp_path / "0.png"))
    about = Image.Exif()
    about[0x0112] = 6
    Image.fromarray(np.rot90(pixels)).save(tmp_path / "turned.png", exif=about)
    rows = [{"prompt": "Which?", "image": name} for name in ("0.png", "turned.png", "1.png")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "vision.yaml").write_text(yaml.safe_dump(data))
    context = prepare(config_of(tmp_path, "rollout.prompts_per_epoch=2"))
    read = read_prompts(context).prompts
    first, turned, other = (read.of(prompt) for prompt in context.prompts["train"])
    assert read.pictures is not None
    inputs = [read.pictures.inputs(-min(ids))["pixel_values"] for ids in (first, turned, other)]
    assert torch.equal(inputs[0], inputs[1])
    assert not torch.equal(inputs[0], inputs[2])
    assert read.stored(first) == read.stored(turned)
    assert first != other


def test_evaluations_show_image_text_and_score(trained: RunContext) -> None:
    content = evaluation_content(trained.chain, 2)
    assert content is not None
    assert {*content.images} == {*content.texts} == {"train", "heldout"}
    with Image.open(content.images["heldout"]) as shown:
        assert shown.width > 600
    page = run_report(trained)
    assert page.count('alt="starts from"') > 2


@declare(media="texts", references=True)
def sees(media: Any, prompts: Any, metadata: Any, references: Any) -> list[float]:
    """Return the mean brightness of the prompt's images."""
    assert all(isinstance(text, str) for text in media)
    return [float(np.mean([image.mean() for image in images])) for images in references]


def test_rewards_and_reports_see_texts_and_images(trained: RunContext, tmp_path: Path) -> None:
    folder = Path(str(trained.config.model.path)).parent
    config = config_of(folder, f"store.root={tmp_path}", "rewards=[{name: 'tests.tasks.modalities.test_vision:sees'}]")
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    scores = RunView(context).scores(1).to_pylist()
    assert len({row["reward"] for row in scores}) == 4
    samples = [row["sample_id"] for row in scores]
    shown = RunView(context).references(1, samples[:1])[samples[0]]
    assert np.mean([image.mean() for image in shown]) == pytest.approx(scores[0]["reward"])


def test_the_export_is_what_was_evaluated(trained: RunContext) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    folder = exported_folder(trained.store, trained.chain.require(2, "export").ref)
    base = AutoModelForImageTextToText.from_pretrained(str(trained.config.model.path))
    plain = PeftModel.from_pretrained(base, folder)
    host = session_of(trained).host
    held: Any = host.trainable(trained.policy_ref(2))
    (prompt, *_) = trained.prompts["train"]
    ids = read_prompts(trained, held.policy).prompts.of(prompt)
    given = held.policy.inputs(base, torch.tensor([ids]), None, None)
    with torch.no_grad():
        own = held.policy.allowed(plain(**given).logits)
        assert torch.allclose(own, held.policy.forward(torch.tensor([ids])).logits, atol=1e-5)
    assert (folder / "preprocessor_config.json").is_file()
    card = (folder / "README.md").read_text()
    assert_repository(card)
    assert "AutoModelForImageTextToText.from_pretrained(" in card
    assert '"type": "image"' in card


def test_full_weights_are_exported_with_their_processor(tmp_path: Path) -> None:
    context = prepare(config_of(tmp_path))
    run_epoch(context, 1)
    run_stage(context, "export", 1)
    folder = exported_folder(context.store, context.chain.require(1, "export").ref)
    made = VisionLM.load(folder, PolicySettings(), frozenset({Part.DENOISER}), {})
    frozen = [torch.equal(value, base) for (name, value), (_, base) in _both(made, tmp_path) if "visual" in name]
    assert frozen
    assert all(frozen)


def _both(made: VisionLM, folder: Path) -> Any:
    base = VisionLM.load(folder / "vlm", PolicySettings(), frozenset({Part.DENOISER}), {})
    return zip(made.model.state_dict().items(), base.model.state_dict().items(), strict=True)


@pytest.mark.parametrize(
    ("algorithm", "further"),
    [
        ("ppo", ["advantage.estimator={name: gae}"]),
        ("ppo", ["advantage.estimator={name: gae}", "critic.backbone=policy"]),
        ("dpo", []),
    ],
)
def test_other_algorithms_train_on_images(algorithm: str, further: list[str], tmp_path: Path) -> None:
    context = prepare(config_of(tmp_path, f"optimize.algorithm={algorithm}", *further))
    run_epoch(context, 1)
    assert updates_of(context, 1)[0]["grad_norm"] > 0


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_given_texts_about_images_are_trained_on(algorithm: str, tmp_path: Path) -> None:
    data = vision_data(tmp_path)
    content = [(tmp_path / f"{number}.png").read_bytes() for number in range(3)]
    columns = {"image": [{"bytes": each, "path": None} for each in content], "answer": ["0", "1", "2"]}
    # Held-out prompts have the same text with other images.
    rows = {"prompt": ["What?", "What?", "What is it?"], **columns, "worse": ["3", "3", "3"]}
    parquet.write_table(pa.table(rows), tmp_path / "given.parquet")
    data["data"] = {"train": str(tmp_path / "given.parquet"), "prompt_image": "image", "sample": "answer"}
    if algorithm == "dpo":
        data["data"] |= {"chosen": "answer", "rejected": "worse"}
    data["prompts"]["train"] = None
    data["optimize"] |= {"algorithm": {"name": algorithm}, "updates_per_epoch": 1}
    (tmp_path / "vision.yaml").write_text(yaml.safe_dump(data))
    config = config_of(tmp_path)
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    (update,) = updates_of(context, 1)
    assert update["grad_norm"] > 0
    assert [len(images) for images in context.references([each.metadata for each in context.prompts["train"]])] == [
        1
    ] * 3
    parquet.write_table(pa.table({**rows, "prompt": ["What?"] * 3}), tmp_path / "given.parquet")
    with pytest.raises(DataError, match=r"row 3: the prompt 'What\?' is in prompts\.heldout too"):
        check_config(config)
    parquet.write_table(pa.table(rows), tmp_path / "given.parquet")
    missing = config.model_copy(
        update={"data": config.data.model_copy(update={"columns": {**config.data.columns, "prompt_image": None}})}
    )
    with pytest.raises(ConfigError, match=r"data\.columns\.prompt_image is not set"):
        check_config(missing)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Where is <|image_pad|>?", "image": "0.png"}, "holds '<|image_pad|>', which stands for an image"),
        ({"prompt": "Which?", "image": "no.png"}, "'.*no.png' does not exist"),
        ({"prompt": "Which?", "image": "broken.png"}, "broken.png' is not an image"),
        ({"prompt": "Which?", "image": ["0.png"] * 9}, "comes with 9 images, but .* takes 8 .* model.options.images"),
        ({"prompt": "Which?", "image": ["2.png"] * 8, "size": 1}, "has .* tokens, but at most .* fit"),
        ({"prompt": "Which?"}, "has no 'image'"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = vision_data(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no image")
    if row.pop("size", None):
        data["rollout"]["tokens"]["max_prompt"] = 30
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "vision.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(FlowmillError, match=message):
        check_config(config_of(tmp_path))
