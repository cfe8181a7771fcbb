"""Runs of models that draw images token by token: trained as texts; stored, scored, shown and exported as images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoProcessor, JanusForConditionalGeneration

from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.memory.language_architectures import language_config
from flowmill.models.memory.language_models import LanguageModelMemory, draw_images, go_on
from flowmill.models.policies.janus import Janus
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.metrics.tracked import evaluation_content
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.tokens.run_prompts import prompts_in, read_prompts
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.plan import RunPlan
from tests.support.cards import assert_repository
from tests.support.given import picture, write_jsonl
from tests.support.inside import evaluate, prepare, run_epoch, run_stage, session_of, stored_shards, updates_of
from tests.support.unified_models import TEMPLATE, unified_data

_LORA = "model.lora={rank: 2, targets: [q_proj, down_proj]}"


def config_of(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "unified.yaml"
    if not path.exists():
        path.write_text(yaml.safe_dump(unified_data(folder)))
    return load_config(path, overrides)


def images_of(context: RunContext, epoch: int) -> dict[str, Any]:
    return {
        name: (shard.media(row).tobytes(), shard.array("tokens", row).tolist(), shard.table["log_probs"][row].as_py())
        for shard in stored_shards(context, epoch, "rollout")
        for row, name in enumerate(shard.table["sample_id"].to_pylist())
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    config = config_of(tmp_path_factory.mktemp("unified"), _LORA, "optimize.algorithm.options={kl_coef: 0.01}")
    check_config(config)
    context = prepare(config)
    for epoch in (1, 2):
        run_epoch(context, epoch)
    evaluate(context, 2)
    run_stage(context, "export", 2)
    return context


def test_replay_is_exact_in_float32(trained: RunContext) -> None:
    for epoch in (1, 2):
        manifest = trained.store.manifest(trained.chain.require(epoch, "optimize").ref)
        assert manifest is not None
        first, *_ = manifest.summary["updates"]
        assert first["replay_gap_max"] == 0.0
        assert first["ratio_std"] == 0.0
        assert 0 < first["sampler_gap"] < 1e-5
        assert first["grad_norm"] > 0


def test_stored_images_are_those_of_the_stored_tokens(trained: RunContext) -> None:
    policy: Any = session_of(trained).host.trainable(trained.policy_ref(2)).policy
    assert isinstance(policy, Janus)
    for pixels, tokens, log_probs in images_of(trained, 1).values():
        assert len(log_probs) == 16
        assert max(tokens[:-16]) < policy.texts <= min(tokens[-16:])
        assert policy.decode(torch.tensor([tokens[-16:]])).numpy().tobytes() == pixels
    (shard, *_) = stored_shards(trained, 1, "rollout")
    assert shard.text(0) is None
    prompt = trained.prompts["train"][0]
    assert read_prompts(trained).prompts.of(prompt) == [1, *policy.tokenizer(prompt.text).input_ids[1:], 3]


def test_rewards_evaluations_and_reports_see_images(trained: RunContext) -> None:
    scores = RunView(trained).scores(1).to_pylist()
    seen = {name: np.frombuffer(pixels, np.uint8) for name, (pixels, *_) in images_of(trained, 1).items()}
    assert {row["sample_id"]: row["reward"] for row in scores} == pytest.approx(
        {name: float(np.mean(image < 128)) for name, image in seen.items()}
    )
    content = evaluation_content(trained.chain, 2)
    assert content is not None
    assert not content.texts
    with Image.open(content.images["heldout"]) as shown:
        assert shown.width > 600
    assert run_report(trained).count("<img") > 2


def test_shards_batches_and_decoding_change_nothing(trained: RunContext, tmp_path: Path) -> None:
    folder = Path(str(trained.config.model.path)).parent
    sizes = ("rollout.groups_per_shard=1", "execution.micro_batch_size=4", "execution.decode_batch_size=3")
    context = prepare(config_of(folder, _LORA, f"store.root={tmp_path}", *sizes))
    run_epoch(context, 1)
    assert images_of(context, 1) == images_of(trained, 1)


def test_the_export_draws_in_plain_transformers(trained: RunContext, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, GenerationConfig

    folder = exported_folder(trained.store, trained.chain.require(2, "export").ref)
    plain: Any = AutoModelForImageTextToText.from_pretrained(str(trained.config.model.path))
    plain.generation_config = GenerationConfig.from_pretrained(folder)
    plain = PeftModel.from_pretrained(plain, folder)
    inputs = AutoProcessor.from_pretrained(folder)(text='"20"', generation_mode="image", return_tensors="pt")
    ids = plain.generate(**inputs, generation_mode="image", guidance_scale=3.0, do_sample=False)
    held: Any = session_of(trained).host.trainable(trained.policy_ref(2))
    row = torch.cat([inputs["input_ids"], ids + held.policy.texts], 1)
    with torch.no_grad():
        own = held.policy.forward(row).logits[0, inputs["input_ids"].shape[1] - 1 : -1].argmax(-1)
    assert own.tolist() == ids[0].tolist()
    card = (folder / "README.md").read_text()
    assert 'generation_mode="image", guidance_scale=3.0' in card
    assert_repository(card)


def test_full_weights_are_trained_and_exported(tmp_path: Path) -> None:
    context = prepare(config_of(tmp_path, "optimize.algorithm=gspo"))
    run_epoch(context, 1)
    run_stage(context, "export", 1)
    folder = exported_folder(context.store, context.chain.require(1, "export").ref)
    made, base = (JanusForConditionalGeneration.from_pretrained(each) for each in (folder, tmp_path / "unified"))
    changed = [name for name, value in made.state_dict().items() if not torch.equal(value, base.state_dict()[name])]
    assert any("language_model" in name for name in changed)
    assert any("generation_head" in name for name in changed)
    assert not any(part in name for name in changed for part in ("vqmodel", "vision_model", "lm_head"))


@pytest.mark.parametrize(
    ("name", "content"),
    [("chat_template.jinja", TEMPLATE), ("chat_template.json", json.dumps({"chat_template": TEMPLATE}))],
)
def test_a_chat_template_gets_its_messages_in_parts(name: str, content: str, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "unified" / name).write_text(content)
    assert prompts_in(tmp_path / "unified", RunPlan(config)).ids("42") == [1, 16, 10, 8, 16, 3]


def test_memory_and_cost_count_both_branches_and_decoding(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    settings = Janus.settings_for(config, dtype=torch.float32, device=torch.device("cpu"), empty=True)
    about = language_config(str(config.model.path))
    measured = LanguageModelMemory(about, settings, None, family=Janus)
    # Two branches, 3 layers of keys and values, 8 rows, 6 tokens of a prompt and all but the last of an image.
    assert measured.trace(go_on, 8, 6 + 15).retained == pytest.approx(2 * 3 * 2 * 8 * (6 + 15) * 96 * 4, rel=0.02)
    assert measured.trace(draw_images, 8, 16).peak > 8 * 32 * 16 * 16 * 4
    # 16 forwards with a cache and one of whole rows.
    assert check_config(config, rewards=False).rollout_forwards == 2 * 16 * (16 + 1)


def given_config(
    folder: Path, rows: list[dict[str, Any]], algorithm: str, *overrides: str, **section: Any
) -> RunConfig:
    """Return a config that trains on given images, of which the last two rows are held out."""
    data = unified_data(folder)
    files = {"train": write_jsonl(folder / "train", rows[:-2]), "heldout": write_jsonl(folder / "apart", rows[-2:])}
    given = {"data": {**{name: str(file) for name, file in files.items()}, **section}}
    prompts = {"heldout": data["prompts"]["heldout"]}
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump({**data, **given, "prompts": prompts, "optimize": {"algorithm": algorithm}}))
    config = load_config(path, overrides)
    remember(config)
    return config


def test_given_images_are_coded_and_trained_by_their_next_token_loss(tmp_path: Path) -> None:
    # Codes of length 1, as in published models.
    rows = [{"prompt": f'"{number}"', "image": picture(number, (16, 16))} for number in range(30, 36)]
    config = given_config(tmp_path, rows, "sft", "optimize.updates_per_epoch=1")
    with_unit_codes(tmp_path / "unified")
    context = prepare(config)
    evaluate(context, 0)
    plain: Any = JanusForConditionalGeneration.from_pretrained(tmp_path / "unified").eval()
    reader: Any = AutoProcessor.from_pretrained(tmp_path / "unified")
    losses = {}
    for row in rows:
        asked = reader(text=row["prompt"], generation_mode="image", return_tensors="pt")["input_ids"]
        pixels = reader.image_processor(row["image"], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            codes = plain.model.vqmodel.encode(pixels).image_tokens.view(1, -1)
            drawn = plain.prepare_embeddings_for_image_generation(codes[:, :-1])
            inputs = torch.cat([plain.get_input_embeddings()(asked), drawn], 1)
            states = plain.model.language_model(inputs_embeds=inputs).last_hidden_state
            logits = plain.model.generation_head(states[:, asked.shape[1] - 1 :])
        losses[row["prompt"]] = torch.nn.functional.cross_entropy(logits[0], codes[0]).item()
    (shard, *_) = stored_shards(context, 0, "ingest")
    assert np.array_equal(shard.media(0), np.asarray(rows[0]["image"]))
    run_epoch(context, 1)
    (update,) = updates_of(context, 1)
    assert update["loss"] == pytest.approx(np.mean(list(losses.values())[:-2]), rel=1e-5)
    evaluate(context, 1)
    before, after = [figures["loss"] for _, _, figures in RunView(context).summaries("validate")]
    assert before == pytest.approx(np.mean(list(losses.values())[-2:]), rel=1e-5)
    assert after < before
    cost = check_config(config, rewards=False)
    assert (cost.optimize_forwards, cost.validate_forwards) == (4, 2), "without guidance"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "columns", "loss"),
    [
        ("dpo", {"chosen": "left", "rejected": "right"}, np.log(2)),
        ("kto", {"sample": "left", "rating": "stars", "scale": (1, 5)}, 0.5),
    ],
)
def test_given_images_that_are_compared_or_rated_are_trained_on(
    algorithm: str, columns: dict[str, Any], loss: float, tmp_path: Path
) -> None:
    sides = (
        {"left": picture(number), "right": picture(50 + number), "stars": 1 + 4 * (number % 2)} for number in range(4)
    )
    rows = [{"prompt": f'"{number}"', **row} for number, row in enumerate(sides, 30)]
    context = prepare(given_config(tmp_path, rows, algorithm, **columns))
    run_epoch(context, 1)
    update = updates_of(context, 1)[0]
    assert update["loss"] == pytest.approx(loss, rel=1e-5)
    assert update["grad_norm"] > 0


def with_unit_codes(folder: Path) -> None:
    model = JanusForConditionalGeneration.from_pretrained(folder)
    book = model.model.vqmodel.quantize.embedding.weight
    with torch.no_grad():
        book.copy_(torch.nn.functional.normalize(book, dim=-1))
    model.save_pretrained(folder)
