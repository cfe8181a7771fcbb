"""``optimize.shared_prompts``: a group's texts share the tokens of their prompt, with the results of separate rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BloomConfig, LlamaConfig, MistralConfig, Qwen2Config

from flowmill.configs.errors import ConfigError
from flowmill.models.maths.shared_prompts import SharedWidths, share_prompts
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM, TrainableLM
from flowmill.models.policies.critic_lm import CriticLM
from flowmill.models.policies.language_classes import check_shares_prompts
from flowmill.models.policies.parts import Part
from flowmill.models.weights.stored_weights import on_meta
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.modalities.tokens import sample_sets
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from tests.support.inside import collect, prepare, run_epoch, training_data
from tests.support.language_models import texts_config, write_language_model
from tests.tasks.algorithms.cases import make_token
from tests.tasks.stages.test_stages import Stop, stop_after

SHARED = "optimize.shared_prompts=true"
#: Tokens of the prompt of each group, and of its completions.
GROUPS: Sequence[tuple[int, Sequence[int]]] = ((5, (1, 3, 5)), (7, (5, 2)), (1, (4,)), (6, (4, 4, 4)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lm") / "lm"
    write_language_model(made)
    return made


@pytest.fixture(scope="module")
def policy(folder: Path) -> TrainableLM:
    held = CausalLM.load(folder, PolicySettings(), frozenset({Part.DENOISER}), {})
    held.model.double()
    return held.trainable(None, seed=0)


def rows(seed: int) -> tuple[torch.Tensor, list[int], list[int], list[int]]:
    """Return ids, tokens of prompts and of texts, and groups."""
    noise = torch.Generator().manual_seed(seed)
    texts, prompts, groups = [], [], []
    for number, (prompt, completions) in enumerate(GROUPS):
        asked = torch.randint(3, 14, (prompt,), generator=noise)
        for completion in completions:
            texts.append(torch.cat([asked, torch.randint(3, 14, (completion,), generator=noise)]))
            prompts.append(prompt)
            groups.append(number)
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return ids, prompts, [len(text) for text in texts], groups


def completions_of(ids: torch.Tensor, prompts: list[int], texts: list[int]) -> torch.Tensor:
    places = torch.arange(ids.shape[1])
    return (places >= torch.tensor(prompts)[:, None]) & (places < torch.tensor(texts)[:, None])


@pytest.mark.parametrize(
    "widths",
    [SharedWidths(prompt=7, completion=5, members=3), SharedWidths(prompt=40, completion=30, members=6)],
    ids=["exact", "wide"],
)
def test_packed_rows_have_the_log_probs_and_gradients_of_separate_rows(
    policy: TrainableLM, widths: SharedWidths
) -> None:
    ids, prompts, texts, groups = rows(1)
    mask, weights = completions_of(ids, prompts, texts), list(policy.policy.model.parameters())

    def computed(shared: Any) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        log_probs, entropy = policy.log_probs(ids, 0.7, shared)
        return log_probs[mask], entropy[mask], torch.autograd.grad(log_probs[mask].square().sum(), weights)

    packed = share_prompts(ids, prompts, texts, groups, widths)
    apart, together = computed(None), computed(packed)
    torch.testing.assert_close(together[:2], apart[:2], rtol=1e-5, atol=1e-6)
    for found, wanted in zip(together[2], apart[2], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not policy.log_probs(ids, 0.7, packed)[0][~mask].any(), "tokens of prompts have no value"
    copies = torch.cat([ids, ids[-1:].expand(3, -1)])
    found, own = policy.log_probs(copies, 0.7, packed.filled(len(copies)))[0], policy.log_probs(ids, 0.7, packed)[0]
    assert torch.equal(found, torch.cat([own, own[-1:].expand(3, -1)]))


@pytest.mark.parametrize("reads", [False, True], ids=["ids", "ids and log-probs"])
def test_packed_rows_have_the_values_of_separate_rows(folder: Path, reads: bool) -> None:
    critic = CriticLM.load(folder, PolicySettings(), frozenset(), {"log_probs": reads}).trainable(None, seed=0)
    drawn = torch.Generator().manual_seed(0)
    for layer in (critic.policy.model.head, critic.policy.model.surprise):
        if layer is not None:
            torch.nn.init.normal_(layer.weight, generator=drawn)
    ids, prompts, texts, groups = rows(2)
    mask = completions_of(ids, prompts, texts)
    log_probs = torch.where(mask, -torch.rand(ids.shape, generator=drawn), 0.0) if reads else None
    packed = share_prompts(ids, prompts, texts, groups, SharedWidths(prompt=7, completion=5, members=3))
    alone = critic.values(ids, log_probs=log_probs)
    found = critic.values(ids, None, packed, log_probs)
    torch.testing.assert_close(found[mask], alone[mask], rtol=1e-4, atol=1e-4)
    if log_probs is not None:
        place = prompts[0] + 1
        log_probs[0, place] -= 1.0
        changed = critic.values(ids, log_probs=log_probs)[0] != alone[0]
        assert not changed[: place + 1].any(), "the value before a token does not depend on it"
        assert changed[place + 1 : texts[0]].all()


def test_a_group_of_four_has_about_half_of_the_tokens() -> None:
    ids = torch.full((8, 200), 5)
    packed = share_prompts(
        ids, [100] * 8, [200] * 8, [0] * 4 + [1] * 4, SharedWidths(prompt=100, completion=100, members=4)
    )
    assert packed.ids.numel() / ids.numel() == 5 / 8


def trained(context: RunContext, epochs: int = 1) -> dict[str, torch.Tensor]:
    for epoch in range(1, epochs + 1):
        run_epoch(context, epoch)
    ref = context.policy_ref(epochs)
    (shard,) = context.store.shards(ref)
    return load_file(context.store.folder(ref, shard) / "policy.safetensors")


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("optimize.algorithm.options={kl_coef: 0.1}",),
        ("optimize.algorithm=ppo", "advantage.estimator.options={kl_coef: 0.05}", "critic.learning_rate=0.01"),
        ("optimize.algorithm=ppo", "critic.backbone=policy"),
    ],
    ids=["grpo", "kl", "critic", "head"],
)
def test_a_run_that_shares_prompts_trains_the_same_policy(tmp_path: Path, settings: tuple[str, ...]) -> None:
    # One update of the whole epoch, so that the order of rows does not matter.
    given = (*settings, "optimize.updates_per_epoch=1", "run.epochs=1")
    config = texts_config(tmp_path, *given, SHARED, "run.name=shared", f"store.root={tmp_path / 'other'}")
    check_config(config)
    apart, together = trained(prepare(texts_config(tmp_path, *given))), trained(prepare(config))
    moved = max(float((apart[name] - each).abs().max()) for name, each in _base(tmp_path).items())
    off = max(float((apart[name] - each).abs().max()) for name, each in together.items())
    assert moved > 5e-4, "the update did something"
    assert off < moved / 20


def _base(folder: Path) -> dict[str, torch.Tensor]:
    return {f"model.{name}": value for name, value in load_file(folder / "lm" / "model.safetensors").items()}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_results_depend_neither_on_shards_nor_on_a_restart(tmp_path: Path, algorithm: str) -> None:
    found = []
    for name, shards in (("two", 2), ("one", 1)):
        config = texts_config(
            tmp_path,
            SHARED,
            f"optimize.algorithm={algorithm}",
            f"rollout.groups_per_shard={shards}",
            f"store.root={tmp_path / name}",
        )
        found.append(trained(prepare(config), 2))
    assert all(torch.equal(found[0][name], each) for name, each in found[1].items())


def test_check_refuses_micro_batches_that_are_smaller_than_the_units_of_training(tmp_path: Path) -> None:
    context = prepare(texts_config(tmp_path))
    collect(context)
    samples: Any = training_data(context).samples()
    for algorithm, together in (("grpo", 4), ("dpo", 2)):
        requires = replace(make_token(algorithm, {}).requires, zero_advantages=True)
        for samples._shares_prompts in (False, True):
            largest = max(samples.units(requires).sizes)
            for size in range(1, 5):
                shared = f"optimize.shared_prompts={str(samples._shares_prompts).lower()}"
                settings = (f"optimize.algorithm={algorithm}", shared, f"execution.micro_batch_size={size}")
                refused = nullcontext() if size >= largest else pytest.raises(ConfigError, match="micro_batch_size is")
                with refused:
                    check_config(texts_config(tmp_path, *settings), rewards=False)
        assert largest == together


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=8), "sliding window"),
        (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding window"),
        (BloomConfig(), "takes no positions"),
        (LlamaConfig(attn_implementation="flex_attention"), "'flex_attention' takes no mask"),
    ],
    ids=["mistral", "qwen2", "bloom", "flex"],
)
def test_models_that_cannot_share_prompts_are_refused(config: Any, reason: str) -> None:
    from transformers import AutoModelForCausalLM

    config.update({"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16})
    model = on_meta(lambda: AutoModelForCausalLM.from_config(config))
    with pytest.raises(ConfigError, match=reason) as refusal:
        check_shares_prompts(model)
    assert "Remove optimize.shared_prompts" in str(refusal.value)


def test_training_packs_the_rows_of_a_batch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither copies that fill a batch up, nor room for texts of a group that are left out."""
    shapes, packed = [], sample_sets.share_prompts

    def counted(ids: Any, prompts: Any, texts: Any, groups: Any, widths: Any) -> Any:
        found = packed(ids, prompts, texts, groups, widths)
        most = max(Counter(groups).values())
        shapes.append((tuple(found.ids.shape), (len(set(groups)), widths.prompt + most * widths.completion)))
        return found

    monkeypatch.setattr(sample_sets, "share_prompts", counted)
    trained(prepare(texts_config(tmp_path, SHARED, "optimize.algorithm=dpo")))
    assert shapes
    assert all(found == expected for found, expected in shapes)


def test_a_resumed_epoch_equals_one_that_was_not_stopped(tmp_path: Path) -> None:
    """A row's packed width, and so the last bits of its log-probs, depend on its micro-batch."""
    settings = [SHARED, "optimize.inner_epochs=3", "execution.checkpoint_every=1", "optimize.learning_rate=1e-2"]
    settings += ["optimize.algorithm.options.kl_coef=0.1", "run.epochs=1"]
    texts_config(tmp_path, prompts_per_epoch=8)
    lengths = (2, 5, 20, 37, 9, 50, 30, 3, 26, 45)
    prompts = [f'{{"prompt": "{("1234567890" * 5)[:length]}+{n}=", "answer": "1"}}' for n, length in enumerate(lengths)]
    (tmp_path / "train.jsonl").write_text("\n".join(prompts) + "\n")
    digests = set()
    for stopped in (0, 1, 3):
        config = texts_config(tmp_path, *settings, f"store.root={tmp_path / str(stopped)}")
        context = prepare(config)
        if stopped:
            stop_after(context, stopped)
            with pytest.raises(Stop):
                run_epoch(context, 1)
            context = begin_run(config)
        run_epoch(context, 1)
        digests.add(context.store.require(context.policy_ref(1)).digest)
    assert len(digests) == 1
