"""Texts are drawn by the model of training and export: log-probs, positions, stop texts, and generation settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from flowmill.configs.errors import ConfigError, EngineError
from flowmill.models.engines.local import BOUNDS, LocalEngine, tolerance_of
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.addition import character_tokenizer
from flowmill.models.quickstart.characters import Characters, llama
from flowmill.models.weights.lora import LoraSpec
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.modalities.tokens.exporting import write_model
from flowmill.tasks.modalities.tokens.text import Stops
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from tests.support.cards import assert_repository
from tests.support.inside import prepare, run_epoch, run_stage, stored_shards, updates_of
from tests.support.language_models import texts_config, write_language_model

CPU = torch.device("cpu")


def load(folder: Path, **settings: Any) -> CausalLM:
    return CausalLM.load(folder, PolicySettings(**settings), frozenset({Part.DENOISER}), {})


def roll_out(context: RunContext) -> None:
    run_stage(context, "rollout", 1)


def disturb(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Let the sampler see logits that are some share from the model's."""
    exact = CausalLM.next_logits

    def other(self: CausalLM, *given: Any) -> Any:
        logits, cache = exact(self, *given)
        return logits * scale, cache

    monkeypatch.setattr(CausalLM, "next_logits", other)


@pytest.mark.parametrize("rescore", [True, False])
def test_a_sampler_that_differs_stops_the_stage_and_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rescore: bool
) -> None:
    context = prepare(texts_config(tmp_path, f"rollout.tokens.rescore={rescore}"))
    disturb(monkeypatch, 1.05)
    with pytest.raises(EngineError) as caught:
        roll_out(context)
    said = str(caught.value)
    assert re.search(r"its log-probs are 0\.\d+ nats per token from those that training computes", said), said
    assert "more than the 0.001 that rounding in float32 explains" in said
    assert "The LlamaForCausalLM (attention 'sdpa', rope_type 'default')" in said
    assert "Set model.attention to 'eager', or choose another model." in said
    # What was made of no batch is committed.
    assert list(Path(str(context.config.store.root)).glob("trajectories/*/_shards/*.json")) == []


def test_rounding_stops_nothing_and_the_shard_says_what_attended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = prepare(texts_config(tmp_path))
    disturb(monkeypatch, 1.00001)
    roll_out(context)
    ref = context.chain.require(1, "rollout").ref
    producers = [record.producer for record in context.store.shards(ref)]
    assert [each["computed_by"]["attention"] for each in producers] == ["sdpa"] * len(producers)


def test_the_bound_is_that_of_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [tolerance_of(LocalEngine(), kind, CPU) for kind in BOUNDS] == [1e-3, 0.1, 0.02]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert tolerance_of(LocalEngine(), torch.float32, torch.device("cuda")) == 0.02
    assert tolerance_of(LocalEngine(), torch.float32, CPU) == 1e-3


def test_attention_that_the_class_has_counts_for_no_identity(tmp_path: Path) -> None:
    found = []
    for name in ("null", "sdpa", "eager"):
        config = texts_config(tmp_path, f"model.attention={name}", f"store.root={tmp_path / name}")
        check_config(config)
        context = prepare(config)
        roll_out(context)
        found.append(context.chain.require(1, "rollout").ref)
        held = load(tmp_path / "lm", attention=None if name == "null" else name)
        assert held.facts == {"attention": "eager" if name == "eager" else "sdpa"}
    assert len(set(found)) == 1
    for name, said in (("native", "does not exist"), ("flash_attention_2", "computes in bfloat16 and float16 only")):
        with pytest.raises(ConfigError, match=f"model.attention.* '{name}'.*{said}"):
            check_config(texts_config(tmp_path, f"model.attention={name}"))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_rows_as_long_as_learned_positions_train(tmp_path: Path, algorithm: str) -> None:
    config = texts_config(tmp_path, "run.epochs=1", f"optimize.algorithm={algorithm}", "rollout.tokens.max_new=12")
    tokenizer = character_tokenizer()
    longest = max(len(tokenizer(f"{a}+{b}=").input_ids) for a in range(1, 4) for b in range(8, 12))
    about = GPT2Config(
        vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=longest + 12, bos_token_id=1, eos_token_id=2
    )
    assert about.n_positions % 4
    GPT2LMHeadModel(about).save_pretrained(tmp_path / "lm")
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    updates = updates_of(context, 1)
    assert updates[0]["ratio_mean"] == 1.0
    assert updates[0]["replay_gap_max"] == 0.0


def special(folder: Path) -> Any:
    """Write a model and return its tokenizer, one of whose special tokens ends no text."""
    write_language_model(folder)
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["9"]})
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_special_tokens_stop_and_texts_without_them_stop_as_before(tmp_path: Path) -> None:
    tokenizer = special(tmp_path)
    nine, one, two, plus = tokenizer.convert_tokens_to_ids(["9", "1", "2", "+"])
    assert tokenizer.decode([one, nine], skip_special_tokens=True) == "1"
    alone = Stops.of(tokenizer, ("9",))
    assert (alone.ids, alone.reached([one, nine]), alone.reached([one, two])) == ({nine}, True, False)
    within = Stops.of(tokenizer, ("19",))
    assert (within.ids, within.reached([one, nine]), within.reached([two, nine])) == (frozenset(), True, False)
    plain = Stops.of(tokenizer, ("1+",))
    assert (plain.ids, plain.marked) == (frozenset(), ())
    # What is stored as the text has no special token, within which a stop text may stand.
    assert [plain.reached(ids) for ids in ([one, plus], [one, nine, plus], [one, two, plus])] == [True, True, False]
    assert not Stops.of(tokenizer, ()).reached([nine])


def test_a_stop_text_that_is_a_special_token_ends_every_completion(tmp_path: Path) -> None:
    config = texts_config(tmp_path, "rollout.tokens.stop=['9']", "rollout.tokens.max_new=24", "rollout.group_size=8")
    tokenizer = special(tmp_path / "lm")
    (nine,) = tokenizer.convert_tokens_to_ids(["9"])
    context = prepare(config)
    roll_out(context)
    rows = [
        shard.array("tokens", row)[shard.array("token_mask", row).astype(bool)].tolist()
        for shard in stored_shards(context, 1, "rollout")
        for row in range(shard.table.num_rows)
    ]
    hit = [row for row in rows if nine in row]
    assert len(hit) > 3
    assert all(row.index(nine) == len(row) - 1 for row in hit)


#: What published models have in generation_config.json, some of it refused by transformers when it is saved.
FOREIGN = {
    "do_sample": False,
    "temperature": 0.9,
    "top_p": 0.6,
    "top_k": 20,
    "min_p": 0.2,
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [7],
    "forced_eos_token_id": 2,
    "max_length": 12,
    "length_penalty": 2.0,
    "bad_words_ids": [[3]],
    "cache_implementation": "static",
}


def write_foreign(folder: Path, **more: Any) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **FOREIGN, **more}))


@pytest.mark.parametrize("adapters", [False, True])
def test_an_export_holds_no_setting_that_the_run_did_not_have(tmp_path: Path, adapters: bool) -> None:
    write_language_model(tmp_path / "lm")
    plain = json.loads((tmp_path / "lm" / "generation_config.json").read_text())
    write_foreign(tmp_path / "lm")
    policy = load(tmp_path / "lm")
    if adapters:
        policy.trainable(LoraSpec(rank=2, alpha=4, targets=("q_proj",)), seed=0)
    write_model(policy, tmp_path / "out", adapters=adapters)
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == plain
    named = [path.name for path in (tmp_path / "out").iterdir() if str(tmp_path).encode() in path.read_bytes()]
    assert not named, "no path of this machine"


def test_every_end_of_the_run_ends_the_exported_models_texts(tmp_path: Path) -> None:
    write_language_model(tmp_path / "lm")
    write_foreign(tmp_path / "lm", eos_token_id=[7, 9])
    for empty in (False, True):
        policy = load(tmp_path / "lm", empty=empty)
        assert policy.eos == {2, 7, 9}, "weights that are spread change no end"
    write_model(load(tmp_path / "lm"), tmp_path / "out", adapters=False)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 7, 9]


def test_the_cards_call_draws_from_the_plain_softmax_and_stops_where_the_run_does(tmp_path: Path) -> None:
    config = texts_config(tmp_path, "run.epochs=1", "rollout.tokens.stop=['9', '4']")
    # transformers tries its own letters on a tokenizer that stop texts are looked for with.
    known = Characters("0123456789+=abcdef")
    llama(0, vocabulary=21, positions=64, layers=2).save_pretrained(tmp_path / "lm")
    saved = known.tokenizer()
    saved.add_special_tokens({"additional_special_tokens": ["9"]})
    saved.save_pretrained(tmp_path / "lm")
    write_foreign(tmp_path / "lm")
    context = prepare(config)
    run_epoch(context, 1)
    run_stage(context, "export", 1)
    folder = exported_folder(context.store, context.chain.target(Node(1, "export")))
    card = (folder / "README.md").read_text()
    assert_repository(card)
    call = re.search(r"ids = model\.generate\(\*\*inputs, max_new_tokens=4, \*\*drawn(.*)\)\n", card)
    assert call is not None
    assert call[1] == ', stop_strings=["9", "4"], tokenizer=tokenizer'
    drawn = json.loads(re.search(r"drawn = (\{.*\})", card)[1].replace("True", "true"))  # type: ignore[index]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("1+2=", return_tensors="pt")
    torch.manual_seed(0)
    found = model.generate(
        **inputs,
        max_new_tokens=40,
        **drawn,
        stop_strings=["9", "4"],
        tokenizer=tokenizer,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for scores, logits in zip(found.scores, found.logits, strict=True):
        torch.testing.assert_close(scores.softmax(-1), logits.softmax(-1))
    said = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    stops = set(tokenizer.convert_tokens_to_ids(["9", "4"])) | {2}
    assert said[-1] in stops
    assert not set(said[:-1]) & stops
