"""Language models through the stages: what is stored replays exactly, and depends on neither shards nor batches."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from flowmill.configs.errors import ConfigError
from flowmill.configs.tokens import TokensSection
from flowmill.models.maths.generation import TokenSampling, generate, reading_once
from flowmill.models.maths.tokens import Widths, draw, token_log_probs
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.language_model_folders import check_vocabulary, load_tokenizer
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.addition import character_tokenizer, tiny_model
from flowmill.models.weights.lora import LoraSpec
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.modalities.tokens.prompts import Prompts
from flowmill.tasks.modalities.tokens.text import FINISHES, completed_text, stored_text
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.plan import RunPlan
from tests.support.inside import (
    collect,
    evaluate,
    make_stage,
    prepare,
    run_epoch,
    run_stage,
    session_of,
    stored_shards,
    training_data,
    updates_of,
)
from tests.support.language_models import texts_config, write_language_model


def samples_of(context: RunContext, epoch: int) -> dict[str, tuple[str, str, list[int], list[float]]]:
    found = {}
    for shard in stored_shards(context, epoch, "rollout"):
        for row in range(shard.table.num_rows):
            about = shard.table.slice(row, 1).to_pylist()[0]
            tokens = shard.array("tokens", row).tolist()
            found[about["sample_id"]] = (
                stored_text(shard, row),
                FINISHES[int(shard.array("finish", row)[0])],
                tokens,
                about["log_probs"],
            )
    return found


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = tmp_path_factory.mktemp("lm") / "lm"
    write_language_model(folder)
    return CausalLM.load(folder, PolicySettings(), frozenset({Part.DENOISER}), {})


def test_the_loop_is_greedy_generate_token_for_token(policy: CausalLM) -> None:
    prompts = [policy.tokenizer(text).input_ids for text in ("1+2=", "12+34=", "7+")]
    sampling = TokenSampling(max_new=6, temperature=1.0, eos=policy.eos)
    ours = generate(policy.next_logits, prompts, sampling, width=16, uniforms=None, device=torch.device("cpu"))
    for prompt, found in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, pad_token_id=0
        )
        assert theirs[0, len(prompt) :].tolist()[: len(found.ids)] == found.ids


def test_a_row_depends_on_neither_its_neighbors_nor_its_place(policy: CausalLM) -> None:
    prompts = [policy.tokenizer(text).input_ids for text in ("1+2=", "12+34=", "7+5=", "9+9=")]
    sampling = TokenSampling(max_new=5, temperature=1.0, eos=policy.eos)
    uniforms = torch.linspace(0.05, 0.95, 20, dtype=torch.float64).reshape(4, 5)

    def drawn(order: list[int]) -> list[list[int]]:
        made = generate(
            policy.next_logits,
            [prompts[i] for i in order],
            sampling,
            width=16,
            uniforms=lambda position: uniforms[order, position],
            device=torch.device("cpu"),
        )
        return [made[order.index(i)].ids for i in range(4)]

    assert drawn([0, 1, 2, 3]) == drawn([3, 1, 0, 2])


@pytest.mark.parametrize("distinct", [3, 2], ids=["all fit", "too many"])
def test_a_prompt_is_read_once_for_all_rows_that_have_it(policy: CausalLM, distinct: int) -> None:
    read = [policy.tokenizer(text).input_ids for text in ("1+2=", "12+34=", "7+5=")]
    prompts = [read[number] for number in (0, 0, 0, 1, 1, 1, 2, 2)]
    shapes: list[tuple[int, ...]] = []

    def forward(*given: Any) -> Any:
        shapes.append(tuple(given[0].shape))
        return policy.next_logits(*given)

    uniforms = torch.rand(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = [
        generate(
            each,
            prompts,
            TokenSampling(max_new=4, temperature=1.0, eos=frozenset()),
            width=16,
            uniforms=lambda position: uniforms[:, position],
            device=torch.device("cpu"),
        )
        for each in (policy.next_logits, reading_once(forward, distinct))
    ]
    assert shapes == [(3 if distinct == 3 else 8, 16), (8, 1), (8, 1), (8, 1)]
    assert len({tuple(completion.ids) for completion in found[0]}) > 3
    for row, once in zip(*found, strict=True):
        assert (row.ids, row.finish) == (once.ids, once.finish)
        assert row.log_probs == pytest.approx(once.log_probs, abs=1e-6)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(policy: CausalLM) -> None:
    prompts = [policy.tokenizer("1+2=").input_ids] * 2
    free = TokenSampling(max_new=8, temperature=1.0, eos=frozenset())
    uniforms = torch.rand(2, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    arguments: dict[str, Any] = {"width": 16, "uniforms": lambda at: uniforms[:, at], "device": torch.device("cpu")}
    whole = generate(policy.next_logits, prompts, free, **arguments)
    end = whole[0].ids[3]
    stopping = TokenSampling(max_new=8, temperature=1.0, eos=frozenset(), stopped=lambda ids: end in ids)
    (first, _) = generate(policy.next_logits, prompts, stopping, **arguments)
    assert first.ids == whole[0].ids[: whole[0].ids.index(end) + 1]
    assert first.finish == "stop"
    assert whole[0].finish == "length"


@pytest.mark.parametrize(
    "lora", [None, LoraSpec(rank=2, alpha=4, targets=("q_proj", "down_proj"))], ids=["all", "lora"]
)
def test_recomputed_layers_keep_less_and_give_the_same_bits(tmp_path: Path, lora: LoraSpec | None) -> None:
    write_language_model(tmp_path)
    found = []
    for recomputed in (False, True):
        settings = PolicySettings(gradient_checkpointing=recomputed)
        loaded = CausalLM.load(tmp_path, settings, frozenset({Part.DENOISER}), {})
        critic = CausalLM.load_critic(tmp_path, settings, own=True, lora=lora, seed=0)
        critic.policy.model.head.weight.data.fill_(0.1)
        trainable, kept = loaded.trainable(lora, seed=0), [0]
        ids = torch.full((2, 16), 5)

        def count(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            log_probs, _ = trainable.log_probs(ids, 1.0)
            values = critic.values(ids)
        (log_probs.sum() + values.sum()).backward()
        gradients = [p.grad for each in (trainable, critic) for p in each.parameters() if p.grad is not None]
        sampling = TokenSampling(max_new=5, temperature=1.0, eos=loaded.eos)
        texts = generate(
            loaded.next_logits, [[1, 5], [1, 6, 7]], sampling, width=16, uniforms=None, device=torch.device("cpu")
        )
        found.append((kept[0], log_probs, gradients, [(text.ids, text.log_probs) for text in texts]))
    (most, *one), (few, *two) = found
    assert few < 0.5 * most
    assert torch.equal(one[0], two[0])
    assert len(one[1]) == len(two[1]) > 3
    assert all(torch.equal(left, right) for left, right in zip(one[1], two[1], strict=True))
    assert one[2] == two[2], "the cache is kept"


@pytest.mark.parametrize("empty", [False, True], ids=["whole", "spread"])
def test_beside_adapters_nothing_is_trained(tmp_path: Path, empty: bool) -> None:
    write_language_model(tmp_path)
    loaded = CausalLM.load(tmp_path, PolicySettings(empty=empty), frozenset({Part.DENOISER}), {})
    trainable = loaded.trainable(LoraSpec(rank=2, alpha=4, targets=("q_proj",)), seed=0)
    assert {name.rpartition(".q_proj.")[2].partition(".")[0] for name, _ in trainable.named_parameters()} == {
        "lora_A",
        "lora_B",
    }


def test_draws_are_the_inverse_of_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7]])).expand(4, 3)
    tokens, log_probs = draw(logits, torch.tensor([0.05, 0.15, 0.35, 0.999], dtype=torch.float64), 1.0)
    assert tokens.tolist() == [0, 1, 2, 2]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([0.1, 0.2, 0.7, 0.7]))
    assert draw(logits, None, 1.0)[0].tolist() == [2] * 4


@pytest.mark.parametrize("decoder", [False, True])
def test_models_that_read_later_tokens_are_refused(tmp_path: Path, decoder: bool) -> None:
    write_language_model(tmp_path)
    config = BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        is_decoder=decoder,
    )
    BertLMHeadModel(config).save_pretrained(tmp_path)
    loading = (
        ("model", lambda: CausalLM.load(tmp_path, PolicySettings(), frozenset({Part.DENOISER}), {})),
        ("critic", lambda: CausalLM.load_critic(tmp_path, PolicySettings(), own=True, lora=None, seed=0)),
    )
    for label, load in loading:
        with nullcontext() if decoder else pytest.raises(ConfigError, match=f"{label}.path.* reads texts both ways"):
            load()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_log_probs_of_a_row_are_the_same_bits_at_any_width_and_whatever_fills_it_up(
    policy: CausalLM, length: int
) -> None:
    ids = torch.randint(3, 15, (1, length), generator=torch.Generator().manual_seed(length))
    found = []
    # Multiples of four, as the longest row of a run may make them, and of sixteen.
    for more in (0, 4, 8, 16):
        width = Widths().of(length) + more
        rows = torch.nn.functional.pad(ids, (0, width - length), value=more // 2).repeat(3, 1)
        rows[1:] = more // 2
        logits = policy.forward(rows).logits
        found.append(token_log_probs(logits, rows, 1.0)[0, :length].detach())
    assert all(torch.equal(found[0], other) for other in found)


def test_batches_are_no_wider_than_the_longest_row_of_the_run() -> None:
    assert [Widths().of(length) for length in (1, 16, 17)] == [16, 16, 32]
    assert [Widths(most=11).of(length) for length in (1, 8, 11)] == [12, 12, 12], "one width for all of them"
    assert [Widths(most=18).of(length) for length in (3, 16, 17, 18)] == [16, 16, 20, 20]
    assert Widths(most=18).of(19) == 32, "rows of a run with other prompts"


@pytest.mark.parametrize("limit", range(1, 70))
def test_no_batch_is_wider_than_the_model_takes(limit: int) -> None:
    for length in range(1, limit + 1):
        assert length <= Widths(limit=limit).of(length) <= limit
        for most in range(1, limit + 1):
            assert length <= Widths(most=most, limit=limit).of(length) <= limit
    widths = {Widths(most=50, limit=50).of(length) for length in range(1, 51)}
    assert widths == {50}, "one width for all of them, as 50 is no multiple of 4"
    assert {Widths(most=48, limit=50).of(length) for length in range(1, 49)} == {16, 32, 48}


def test_log_probs_as_they_were_drawn_spare_a_forward_and_train_from_ratios_of_1(tmp_path: Path) -> None:
    found, updates = [], []
    for rescore in (True, False):
        settings = (f"store.root={tmp_path / str(rescore)}", f"rollout.tokens.rescore={rescore}")
        context = prepare(texts_config(tmp_path, *settings))
        run_epoch(context, 1)
        found.append(samples_of(context, 1))
        updates.append(updates_of(context, 1)[0])
    assert found[0].keys() == found[1].keys()
    for name, (*drawn, log_probs) in found[0].items():
        assert drawn == list(found[1][name][:3])
        assert log_probs == pytest.approx(found[1][name][3], abs=1e-5)
    assert [update["ratio_mean"] for update in updates] == [1.0, 1.0]
    assert updates[0]["sampler_gap"] > 0 == updates[0]["replay_gap_max"]
    assert updates[1]["sampler_gap"] == 0 < updates[1]["replay_gap_max"] < 1e-5


@pytest.mark.parametrize("experts", [False, True])
def test_texts_train_with_ratios_of_1_and_are_exported_as_transformers_loads_them(
    tmp_path: Path, experts: bool
) -> None:
    config = texts_config(tmp_path)
    if experts:
        # Files have each expert alone, the model all of a layer in one weight.
        about = tiny_model(0).config.to_dict() | {"num_local_experts": 4, "num_experts_per_tok": 2}
        names = set(MixtralConfig().to_dict()) - {"model_type", "architectures", "head_dim"}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            own = MixtralConfig(**{name: value for name, value in about.items() if name in names})
            MixtralForCausalLM(own).save_pretrained(tmp_path / "lm")
    check_config(config)
    context = prepare(config)
    evaluate(context, 0)
    for epoch in (1, 2):
        run_epoch(context, epoch)
        updates = updates_of(context, epoch)
        assert updates[0]["ratio_mean"] == 1.0
        assert updates[0]["replay_gap_max"] == 0.0, "stored log-probs are those that training computes"
        data = training_data(context, epoch)
        samples = data.samples()
        rows = np.concatenate([units.rows[:, 0] for units in data.plan(samples)])
        chosen = [np.array(samples.reader.array("sampled_log_probs", int(row))) for row in rows]
        gaps = [np.abs(each - samples.reader.log_probs[row]).max() for row, each in zip(rows, chosen, strict=True)]
        assert max(gaps) < 1e-5
        assert max(each["sampler_gap"] for each in updates) == pytest.approx(float(max(gaps)))
    evaluate(context, 2)
    assert evaluation_figures(context.chain, 2)["heldout"].keys() == {config.rewards[0].slot}
    run_stage(context, "export", 2)
    folder = exported_folder(context.store, context.chain.target(Node(2, "export")))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    held = session_of(context).host.trainable(context.policy_ref(2))
    for name, parameter in held.policy.model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    assert AutoTokenizer.from_pretrained(folder)("1+2=").input_ids == character_tokenizer()("1+2=").input_ids
    for text, finish, tokens, log_probs in samples_of(context, 1).values():
        assert finish in ("eos", "length")
        assert 1 <= len(log_probs) <= 4
        ended = tokens[-len(log_probs) :]
        assert text == character_tokenizer().decode(ended, skip_special_tokens=True)
        assert (finish == "eos") == (ended[-1] == 2)


def test_texts_depend_on_neither_shards_nor_micro_batches(tmp_path: Path) -> None:
    found, weights = [], []
    for name, settings in (
        ("one", ("rollout.groups_per_shard=1", "execution.micro_batch_size=16")),
        ("two", ("rollout.groups_per_shard=4", "execution.micro_batch_size=4")),
    ):
        context = prepare(texts_config(tmp_path, f"store.root={tmp_path / name}", *settings))
        run_epoch(context, 1)
        found.append(samples_of(context, 1))
        record = context.store.shards(context.policy_ref(1))[0]
        weights.append(load_file(context.store.folder(context.policy_ref(1), record) / "policy.safetensors"))
    assert found[0] == found[1]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=3e-5)


@pytest.mark.parametrize("normalization", ["token_mean", "sequence_mean"])
def test_adapters_train_and_the_reference_is_the_base_model(tmp_path: Path, normalization: str) -> None:
    options = f"{{name: grpo, options: {{normalization: {normalization}, kl_coef: 0.1}}}}"
    lora = "model.lora={rank: 2, alpha: 4}"
    context = prepare(texts_config(tmp_path, lora, f"optimize.algorithm={options}", "optimize.learning_rate=1e-2"))
    run_epoch(context, 1)
    updates = updates_of(context, 1)
    assert updates[0]["kl"] == pytest.approx(0, abs=1e-6), "fresh adapters change nothing yet"
    assert updates[1]["kl"] > 0


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_texts_of_older_policies_are_trained_as_what_the_policy_gives_them_now(tmp_path: Path, algorithm: str) -> None:
    replay = "optimize.replay={epochs: 1, max_importance: 50}"
    config = texts_config(tmp_path, replay, f"optimize.algorithm={algorithm}", "optimize.learning_rate=0.01")
    check_config(config)
    context = prepare(config)
    for epoch in (1, 2):
        run_epoch(context, epoch)
    first = updates_of(context, 2)[0]
    assert first["ratio_mean"] == 1.0, "stale rows too are clipped around the policy the epoch starts from"
    assert first["importance"] != 1.0
    assert 0 < first["effective_samples"] <= 1
    stage = make_stage(context, "optimize", 2)
    held: Any = stage.host.trainable(context.policy_ref(1))
    data = training_data(context, 2)
    samples: Any = data.samples(stage.host)
    stale = samples.stale(data.algorithm.requires)
    assert len(stale) > 0
    section = config.optimize.replay
    assert section is not None
    models = stage.modality.models(config, held, {})
    samples.correct(samples.recompute(stale, models, size=4, file=None, idle=()), section)
    batch: Any = samples.batch(stale.slice(0, 2), 4)
    now, _ = held.log_probs(batch.ids, 1.0)
    for row, (sample, _) in enumerate(batch.keys[:2]):
        own = now[row][batch.mask[row]].detach().numpy()
        gap = own - samples.reader.log_probs[sample]
        expected = np.exp(min(gap.mean(), np.log(50)))
        assert float(batch.importance[row]) == pytest.approx(expected, rel=1e-4)
        np.testing.assert_allclose(batch.old_log_probs[row][batch.mask[row]].numpy(), own, atol=1e-6)
        stored = batch.behavior_log_probs[row][batch.mask[row]].numpy()
        np.testing.assert_array_equal(stored, samples.reader.log_probs[sample])


def test_the_best_texts_of_earlier_epochs_alone_are_trained_on_again(tmp_path: Path) -> None:
    replayed = []
    for share in (1.0, 0.25):
        settings = (f"optimize.replay={{epochs: 1, share: {share}}}",)
        config = texts_config(tmp_path, *settings, f"run.name=run-{share}")
        check_config(config)
        context = prepare(config)
        run_epoch(context, 1)
        collect(context, 2)
        data = training_data(context, 2)
        samples = data.samples(session_of(context).host)
        rows = np.concatenate([units.rows for units in data.plan(samples)])
        replayed.append(int((samples.reader.epochs[rows[:, 0]] == 1).sum()))
    assert 0 < replayed[1] <= 4 < replayed[0]


def test_pairs_of_stored_texts_however_old_are_what_dpo_learns_from(tmp_path: Path) -> None:
    settings = ("optimize.algorithm=dpo", "optimize.replay={epochs: 1}", "optimize.learning_rate=0.01")
    config = texts_config(tmp_path, *settings)
    check_config(config)
    context = prepare(config)
    for epoch in (1, 2):
        run_epoch(context, epoch)
    first, second = (updates_of(context, epoch) for epoch in (1, 2))
    assert first[0]["loss"] == pytest.approx(np.log(2)), "before the first update the policy is the base model"
    assert first[0]["margin"] == 0.0
    assert second[-1]["margin"] > 0
    assert second[-1]["loss"] < np.log(2)
    data = training_data(context, 2)
    samples = data.samples(session_of(context).host)
    rows = np.concatenate([units.rows for units in data.plan(samples)])
    assert set(samples.reader.epochs[rows[:, 0]].tolist()) == {1, 2}
    assert all(size == 2 for units in data.plan(samples) for size in units.sizes)


def test_texts_rolled_out_ahead_start_from_ratios_of_1(tmp_path: Path) -> None:
    tis = "optimize.algorithm={name: grpo, options: {tis: 2.0}}"
    config = texts_config(tmp_path, "execution.ahead=1", "run.epochs=3", "optimize.learning_rate=0.01", tis)
    check_config(config)
    context = prepare(config)
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
        first = updates_of(context, epoch)[0]
        assert first["ratio_mean"] == 1.0
        assert ("importance" in first) == (epoch > 1)
        # The sampler had the parameters of the policy that made the texts, not of the one that the epoch starts from.
        assert first["sampler_gap"] < 1e-5
        assert first["tis"] == pytest.approx(1, abs=1e-5)


def test_prompts_are_cut_on_the_left_or_refused() -> None:
    tokenizer = character_tokenizer()
    refusing = Prompts(tokenizer, TokensSection(max_prompt=4), 128)
    assert refusing.ids("1+2") == [1, *tokenizer.convert_tokens_to_ids(list("1+2"))]
    with pytest.raises(ConfigError, match=r"prompt '12\+34=' has 7 tokens, but at most 4 fit"):
        refusing.ids("12+34=")
    cutting = Prompts(tokenizer, TokensSection(max_prompt=4, on_overlong="cut_left"), None)
    assert cutting.ids("12+34=") == tokenizer.convert_tokens_to_ids(list("+34="))
    with pytest.raises(ConfigError, match="the model takes 8 tokens in all, so no prompt fits"):
        Prompts(tokenizer, TokensSection(max_new=8), 8)
    with pytest.raises(ConfigError, match=r"rollout\.tokens\.system is set"):
        Prompts(tokenizer, TokensSection(system="Add."), None)


def test_a_template_is_rendered_to_ids_and_one_that_fails_is_named() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}={% if fail is defined %}{{ fail() }}{% endif %}"
    assert Prompts(tokenizer, TokensSection(), None).ids("1+2") == tokenizer.convert_tokens_to_ids(list("1+2="))
    tokenizer.chat_template = "{{ raise_exception('no user here') }}"
    with pytest.raises(ConfigError, match="chat template fails for prompt '1\\+2': no user here"):
        Prompts(tokenizer, TokensSection(), None).ids("1+2")


@pytest.mark.parametrize(("kind", "token"), [("LlamaTokenizer", "'<s>'"), ("GPT2Tokenizer", "'<|endoftext|>'")])
def test_a_tokenizer_that_adds_tokens_when_it_is_loaded_is_named_with_a_remedy_that_works(
    tmp_path: Path, kind: str, token: str
) -> None:
    names = ["<pad>", *map(chr, range(32, 127))]
    core = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<pad>", pad_token="<pad>").save_pretrained(tmp_path)
    LlamaConfig(vocab_size=len(names)).save_pretrained(tmp_path)
    check_vocabulary(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": kind}))
    with pytest.raises(ConfigError) as error:
        check_vocabulary(tmp_path)
    said = str(error.value)
    assert f"{token}" in said.partition("The files do not hold")[2]
    assert f"the class {kind} adds its default tokens when it is loaded" in said
    assert said.endswith("and save it.")
    saved = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<pad>")
    saved.save_pretrained(str(tmp_path))
    check_vocabulary(tmp_path)


def test_dates_of_templates_are_of_the_identity_where_they_are_set(tmp_path: Path) -> None:
    section, config = TokensSection(template_date=date(2024, 7, 26)), texts_config(tmp_path)
    about = RunPlan(config).modality_spec.rollout_options(RunPlan(config))["tokens"]
    assert "template_date" not in about
    dated = config.model_copy(update={"rollout": config.rollout.model_copy(update={"tokens": section})})
    assert RunPlan(dated).modality_spec.rollout_options(RunPlan(dated))["tokens"]["template_date"] == "2024-07-26"
    assert RunPlan(dated).modality_spec.evaluation_options(RunPlan(dated))["tokens"]["template_date"] == "2024-07-26"


def test_prompts_of_a_local_model_are_checked_before_a_run(tmp_path: Path) -> None:
    config = texts_config(tmp_path)
    folder = Path(str(config.model.path))
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%H') }}{{ messages[-1].content }}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"prompts.train, number 1: the chat template reads the clock.*template_date"):
        check_config(config, rewards=False)


def test_advantages_of_a_row_count_by_the_tokens_of_the_whole_update(tmp_path: Path) -> None:
    from flowmill.tasks.modalities.rows import Units

    context = prepare(texts_config(tmp_path))
    collect(context)
    samples = training_data(context).samples(session_of(context).host)
    rows = np.stack([np.arange(6), np.zeros(6, np.int64)], 1)
    samples.begin_update(Units(rows, np.arange(7)))
    counts = samples.reader.log_probs.sizes[:6]
    batch: Any = samples.batch(Units(rows[:2], np.arange(3)), 4)
    assert batch.share.tolist() == pytest.approx([6 / counts.sum()] * 4)
    assert batch.mask[:2].sum(-1).tolist() == counts[:2].tolist()


def test_a_tokenizer_of_another_model_is_refused_before_any_work(tmp_path: Path) -> None:
    config = texts_config(tmp_path)
    check_config(config)
    other = character_tokenizer()
    other.add_tokens(["<think>", "</think>"])
    other.save_pretrained(tmp_path / "lm")
    with pytest.raises(ConfigError, match="ids up to 16, but its model has 16 embeddings"):
        check_config(config)


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_plus_plus"])
def test_one_sample_per_group_is_enough_where_groups_are_not_compared(tmp_path: Path, algorithm: str) -> None:
    check_config(texts_config(tmp_path, "rollout.group_size=1", f"optimize.algorithm={algorithm}"))


def test_a_text_that_ends_at_once_is_empty_and_its_end_is_trained(policy: CausalLM) -> None:
    (end,) = policy.eos

    def ending(ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        return torch.nn.functional.one_hot(torch.full((len(ids),), end), 16).float() * 99, cache

    sampling = TokenSampling(max_new=6, temperature=1.0, eos=policy.eos)
    (found,) = generate(ending, [[1, 5]], sampling, width=16, uniforms=None, device=torch.device("cpu"))
    assert (found.ids, found.finish, len(found.log_probs)) == ([end], "eos", 1)
    assert completed_text(policy.tokenizer, found.ids) == ""


def test_a_model_without_a_padding_token_trains(tmp_path: Path) -> None:
    config = texts_config(tmp_path, "run.epochs=1")
    plain = character_tokenizer()
    plain.pad_token = None
    plain.save_pretrained(tmp_path / "lm")
    check_config(config)
    context = prepare(config)
    assert padding_of(context) is None
    run_epoch(context, 1)
    updates = updates_of(context, 1)
    assert updates[0]["ratio_mean"] == 1.0


def padding_of(context: RunContext) -> int | None:
    found: int | None = load_tokenizer(context.base_folder).pad_token_id
    return found
