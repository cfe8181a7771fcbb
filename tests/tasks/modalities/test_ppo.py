"""PPO through the stages: a critic next to the policy, values of tokens, and advantages estimated from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaConfig, LlamaForCausalLM

from flowmill.configs.advantages import AdvantageSection
from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.quickstart.addition import character_tokenizer, tiny_model
from flowmill.models.quickstart.characters import Characters
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.export.checkpoint import export_checkpoint
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.metrics.samples import rows_of
from flowmill.tasks.modalities.tokens.text import FINISHES
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.stages.stage_run import StageRun
from tests.support.inside import evaluate, make_stage, prepare, run_epoch, stage_rows, summary_of, updates_of
from tests.support.language_models import texts_config, write_language_model

READS = ("critic.log_probs=true",)
PPO = ("optimize.algorithm=ppo", "advantage.estimator.options={kl_coef: 0.05}", "critic.learning_rate=0.01")


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return texts_config(folder, *PPO, *overrides)


def files_of(context: RunContext, epoch: int) -> Path:
    ref = context.policy_ref(epoch)
    return context.store.folder(ref, context.store.shards(ref)[0])


#: Settings of ``advantage`` that act with an estimator of tokens, and details of others that are refused.
OF_TOKENS = {"estimator", "informative", "overlong"}
DETAILS = {"epsilon", "floor", "unbiased", "buffer", "min_count"}
OF_SAMPLES = dict(
    each.split("=")
    for each in "aggregation=gdpo std=global mean=leave_one_out mode=positive_only best_of=2 clip=3 soft_clip=3 "
    "group_mean_min=0.1 group_mean_max=0.9 diversity=x kl_coef=0.1 kl_gate=0.5".split()
)


@pytest.mark.parametrize("estimator", ["gae", "rloo", "reinforce", "reinforce_plus_plus"])
def test_settings_of_advantages_of_samples_are_refused_next_to_those_of_tokens(tmp_path: Path, estimator: str) -> None:
    assert AdvantageSection.model_fields.keys() == OF_TOKENS | DETAILS | OF_SAMPLES.keys()
    algorithm = f"optimize.algorithm={'ppo' if estimator == 'gae' else 'grpo'}"
    settings = (algorithm, f"advantage.estimator={estimator}")
    check_config(texts_config(tmp_path, *settings), rewards=False)
    for name, value in OF_SAMPLES.items():
        with pytest.raises(ConfigError, match=rf"advantage\.{name}"):
            check_config(texts_config(tmp_path, *settings, f"advantage.{name}={value}"), rewards=False)


def test_a_critic_learns_beside_the_policy(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.epochs=3")
    check_config(config)
    assert config.advantage.estimator.name == "gae", "it follows the algorithm"
    stages = [node.stage for node in RunPlan(config).nodes() if node.epoch == 1]
    assert stages[:5] == ["rollout", "score", "value", "advantage", "optimize"]
    context = prepare(config)
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
    first, second = updates_of(context, 1)
    assert first["ratio_mean"] == 1.0
    assert first["kl_before_k1"] == 0.0, "the policy still is the base model, to the last bit"
    assert first["value"] == 0.0, "a fresh head says nothing"
    assert second["kl_before_k3"] > 0
    assert second["value"] != 0
    assert {"critic_loss", "critic_grad_norm", "critic_lr", "value_clip"} <= first.keys()
    assert first["critic_lr"] == 0.01
    names = {path.name for path in files_of(context, 1).iterdir()}
    assert {
        "policy.safetensors",
        "optimizer.safetensors",
        "critic.safetensors",
        "critic_optimizer.safetensors",
    } <= names
    export_checkpoint(context, 1, tmp_path / "exported")
    dcp_to_torch_save(tmp_path / "exported", tmp_path / "all.pt")
    exported: dict[str, Any] = torch.load(tmp_path / "all.pt")
    rates = [exported[name]["param_groups"][0]["lr"] for name in ("optim", "critic_optim")]
    assert rates == [config.optimize.learning_rate, 0.01], "each optimizer has the rate it trained with"
    summaries = [summary_of(context, e, "advantage") for e in (1, 2, 3)]
    assert summaries[0]["kl"] == 0.0
    assert summaries[0]["explained_variance"] == 0.0
    assert summaries[1]["kl"] != 0.0
    tokens = read_rows(context.store, context.chain.require(2, "advantage").ref, "token_advantages")
    values = stage_rows(context, 2, "value")
    lengths = [len(row) for row in values.column("values").to_pylist()]
    assert [len(row) for row in tokens.column("advantages").to_pylist()] == lengths
    whole = np.concatenate([np.asarray(row) for row in tokens.column("advantages").to_pylist()])
    assert whole.mean() == pytest.approx(0, abs=1e-6)
    assert whole.std(ddof=1) == pytest.approx(1, abs=1e-5)


def test_the_kl_is_told_after_each_update_too(tmp_path: Path) -> None:
    context = prepare(config_of(tmp_path, "optimize.algorithm.options={kl_after: true}", "optimize.learning_rate=0.01"))
    run_epoch(context, 1)
    first, second = updates_of(context, 1)
    assert first["kl_before_k3"] == 0
    assert first["kl_after_k3"] > 0
    assert second["kl_after_k3"] > first["kl_after_k3"]


def test_a_new_reward_needs_neither_rollouts_nor_values_and_a_new_critic_no_rollouts(tmp_path: Path) -> None:
    plain = prepare(config_of(tmp_path))
    run_epoch(plain, 1)
    rewarded = prepare(
        config_of(tmp_path, "run.name=other", 'rewards=[{name: "tests.support.language_models:digits_in", weight: 2}]')
    )
    valued = prepare(config_of(tmp_path, "run.name=third", "critic.backbone=policy"))
    for context, same in ((rewarded, ("rollout", "value")), (valued, ("rollout",))):
        run_epoch(context, 1)
        for stage in ("rollout", "value", "advantage", "optimize"):
            node = Node(1, stage)
            assert (context.chain.ref(node) == plain.chain.ref(node)) == (stage in same), stage


@pytest.mark.campaign_cases("overrides1", "overrides2")
@pytest.mark.parametrize("overrides", [(), ("model.lora={rank: 2, alpha: 4}",), ("critic.backbone=policy",), READS])
def test_training_goes_on_from_its_files_as_from_memory(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    found = []
    for name in ("memory", "files"):
        context = prepare(config_of(tmp_path, f"store.root={tmp_path / name}", "run.name=one", *overrides))
        run_epoch(context, 1)
        if name == "files":
            context = prepare(config_of(tmp_path, f"store.root={tmp_path / name}", "run.name=one", *overrides))
        run_epoch(context, 2)
        found.append({path.name: path.read_bytes() for path in files_of(context, 2).iterdir()})
    assert found[0] == found[1]
    critic = load_file(files_of(context, 2) / "critic.safetensors")
    assert any("surprise" in name and value.any() for name, value in critic.items()) == (overrides == READS)


def test_a_critic_begins_fresh_beside_a_policy_that_was_trained_alone(tmp_path: Path) -> None:
    plain = prepare(texts_config(tmp_path, "run.name=one"))
    run_epoch(plain, 1)
    overrides = ["optimize.algorithm=ppo", "advantage.estimator=gae"]
    context = open_run(plain.store.root.uri, "one", overrides=overrides, epoch=2, trusted=True)
    run_epoch(context, 2)
    first = updates_of(context, 2)[0]
    assert first["value"] == 0.0
    assert first["critic_grad_norm"] > 0
    assert (files_of(context, 2) / "critic.safetensors").exists()
    assert not (files_of(plain, 1) / "critic.safetensors").exists()


def test_values_of_a_shared_backbone_do_not_move_the_policy(tmp_path: Path) -> None:
    weights = []
    for rate in ("0.1", "0.0001"):
        context = prepare(
            config_of(
                tmp_path,
                f"store.root={tmp_path / rate}",
                "critic.backbone=policy",
                "optimize.updates_per_epoch=1",
                f"critic.learning_rate={rate}",
            )
        )
        run_epoch(context, 1)
        weights.append(load_file(files_of(context, 1) / "policy.safetensors"))
        critic = load_file(files_of(context, 1) / "critic.safetensors")
        assert set(critic) == {"critic.head.weight", "critic.head.bias"}
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_critic_alone_learns_in_the_first_epochs(tmp_path: Path) -> None:
    context = prepare(config_of(tmp_path, "critic.alone_epochs=1"))
    run_epoch(context, 1)
    base = load_file(tmp_path / "lm" / "model.safetensors")
    held = load_file(files_of(context, 1) / "policy.safetensors")
    assert all(torch.equal(held[f"model.{name}"], value) for name, value in base.items() if f"model.{name}" in held)
    assert updates_of(context, 1)[0]["critic_grad_norm"] > 0
    assert updates_of(context, 1)[0]["grad_norm"] == 0
    run_epoch(context, 2)
    assert updates_of(context, 2)[0]["ratio_mean"] == 1.0
    assert updates_of(context, 2)[0]["grad_norm"] > 0


def test_the_coefficient_of_the_kl_follows_that_of_the_epoch_before(tmp_path: Path) -> None:
    options = "advantage.estimator.options={kl_coef: 0.1, target_kl: 1.0e-6, horizon: 32}"
    context = prepare(config_of(tmp_path, options, "run.epochs=3", "optimize.learning_rate=0.01"))
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
    found = [summary_of(context, e, "advantage") for e in (1, 2, 3)]
    assert found[0]["kl_coef"] == 0.1
    assert found[1]["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 16 / 32)), "the KL of the first epoch is 0"
    sign = 0.2 if found[1]["kl"] > 1e-6 else -0.2
    assert found[2]["kl_coef"] == pytest.approx(found[1]["kl_coef"] * (1 + sign * 16 / 32))
    last = make_stage(context, "advantage", 3)
    assert last.inputs()[-1] == context.chain.require(2, "advantage").ref
    StageRun(last).execute()


@pytest.mark.parametrize(
    ("algorithm", "estimator"),
    [
        ("grpo", "{name: reinforce, options: {kl_coef: 0.05}}"),
        ("grpo", "{name: rloo, options: {kl_coef: 0.05}}"),
        ("reinforce_plus_plus", "{name: reinforce_plus_plus}"),
        ("reinforce_plus_plus", "{name: reinforce_plus_plus, options: {baseline: group}}"),
    ],
)
def test_estimators_without_a_critic_train(tmp_path: Path, algorithm: str, estimator: str) -> None:
    config = texts_config(tmp_path, f"optimize.algorithm={algorithm}", f"advantage.estimator={estimator}")
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    assert updates_of(context, 1)[0]["ratio_mean"] == 1.0
    assert not (files_of(context, 1) / "critic.safetensors").exists()
    assert ("value" in [node.stage for node in RunPlan(config).nodes()]) == ("kl_coef" in estimator)


def write_wide_model(folder: Path) -> None:
    """A model of four layers whose hidden states are of another width than the policy's."""
    config = LlamaConfig(
        **{**tiny_model(0).config.to_dict(), "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16}
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


def test_a_critic_begins_as_another_model_wherever_that_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        torch.manual_seed(0)
        write_wide_model(tmp_path / name)
    write_language_model(tmp_path / "other", seed=5)
    base, one = config_of(tmp_path, "run.name=base"), config_of(tmp_path, f"critic.path={tmp_path / 'one'}")
    check_config(one)
    context = prepare(one)
    run_epoch(context, 1)
    first, second = updates_of(context, 1)
    assert first["value"] == 0.0
    assert second["value"] != 0.0
    stored = load_file(files_of(context, 1) / "critic.safetensors")
    assert stored["critic.head.weight"].shape == (1, 64)
    assert "critic.backbone.layers.3.mlp.up_proj.weight" in stored
    found = {
        name: [options_of(config, stage) for stage in ("rollout", "value", "optimize")]
        for name, config in {
            "base": base,
            "one": one,
            "two": config_of(tmp_path, f"critic.path={tmp_path / 'two'}", "run.name=two"),
            "other": config_of(tmp_path, f"critic.path={tmp_path / 'other'}", "run.name=other"),
        }.items()
    }
    assert found["one"] == found["two"], "the same model elsewhere"
    assert all(found[name][0] == found["base"][0] for name in found), "no critic has a part in rollouts"
    for number in (1, 2):
        assert not any(found["one"][number] == found[name][number] for name in ("base", "other"))
        assert "critic_base" not in found["base"][number]


def options_of(config: RunConfig, stage: str) -> dict[str, Any]:
    return dict(make_stage(prepare(config), stage, 1).options())


def test_a_critic_that_reads_other_tokens_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"critic.path={tmp_path / 'strange'}")
    tiny_model(0).save_pretrained(tmp_path / "strange")
    Characters("9876543210+=").tokenizer().save_pretrained(tmp_path / "strange")
    with pytest.raises(ConfigError, match=r"gives '0' the id 12, but to that of the policy, .* it is 3: the critic"):
        check_config(config)


def test_long_texts_cost_and_those_that_were_cut_are_left_out(tmp_path: Path) -> None:
    found = []
    for number, overlong in enumerate(("null", "{buffer: 3, factor: 0.6}", "{buffer: 1, factor: 0, exclude: true}")):
        name = f"run.name=run-{number}"
        config = texts_config(tmp_path, f"advantage.overlong={overlong}", name)
        check_config(config)
        context = prepare(config)
        run_epoch(context, 1)
        table = stage_rows(context, 1, "advantage")
        rolled = context.chain.require(1, "rollout").ref
        samples = {sample: (shard, row) for sample, shard, row in rows_of(context.store, rolled, None)}
        found.append({row["sample_id"]: (*samples[row["sample_id"]], row["reward"]) for row in table.to_pylist()})
    plain, punished, excluded = found
    ends = set()
    for sample, (shard, row, reward) in plain.items():
        length, finish = len(shard.table.column("log_probs")[row].as_py()), FINISHES[shard.array("finish", row)[0]]
        ends.add((length, finish))
        assert punished[sample][2] == pytest.approx(reward - 0.2 * max(0, length - 1), abs=1e-6)
        assert excluded[sample][2] == (None if finish == "length" else pytest.approx(reward))
    assert ends >= {(2, "eos"), (4, "eos"), (4, "length")}, "some end by themselves, some with the last token"


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_plus_plus"])
def test_an_epoch_trains_on_as_many_groups_that_say_something(tmp_path: Path, algorithm: str) -> None:
    settings = [f"optimize.algorithm={algorithm}", "rollout.group_size=2", "rollout.prompts_per_epoch=8"]
    settings += ["rewards=[{name: 'tests.support.language_models:coin'}]", "prompts.train=many.txt"]
    (tmp_path / "many.txt").write_text("\n".join(f"{number}+1=" for number in range(8)))
    found = []
    for number, informative in enumerate((None, 1, 8)):
        chosen = [f"advantage.informative={informative}"] if informative else []
        config = texts_config(tmp_path, *settings, *chosen, f"run.name=run-{number}")
        check_config(config)
        context = prepare(config)
        run_epoch(context, 1)
        entry = context.chain.require(1, "advantage")
        groups: dict[str, list[float | None]] = {}
        for row in read_rows(context.store, entry.ref).to_pylist():
            groups.setdefault(row["group_id"], []).append(row["advantage"])
            assert row["reward"] is not None, "later epochs choose prompts by it"
        updates = updates_of(context, 1)
        summary = context.store.require(entry.ref).summary
        found.append((groups, summary, sum(update["rows"] for update in updates)))
    (plain, plain_summary, _), (one, summary, rows), (most, all_of_them, _) = found
    saying = [name for name, advantages in plain.items() if len(set(advantages)) > 1]
    assert 1 < len(saying) < 8
    assert [name for name, advantages in one.items() if None not in advantages] == saying[:1]
    assert [name for name, advantages in most.items() if None not in advantages] == saying
    assert (summary["informative_groups"], rows) == (len(saying), 2)
    assert "excluded_groups" not in summary, "no reward failed"
    for name in ("reward_mean", "zero_std_ratio"):
        assert summary[name] == plain_summary[name], "of all samples"
    assert all_of_them["informative_groups"] == len(saying), "fewer than wanted are what there is"


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_sums_are_learned_from_their_reward_and_not_from_a_coin(tmp_path: Path) -> None:
    """The control: the same model, data and settings, with a reward that says nothing of the sums."""
    gained = []
    for name, reward in (("sums", "exact_text"), ("coin", "tests.support.language_models:coin")):
        overrides = [
            f"run.name={name}",
            "run.epochs=16",
            "critic.alone_epochs=1",
            "evaluate.judges=[{name: exact_text, label: sums}]",
        ]
        config = load_config("addition_ppo", [*overrides, f"rewards=[{{name: '{reward}'}}]", f"store.root={tmp_path}"])
        context = prepare(config)
        evaluate(context, 0)
        for epoch in range(1, 17):
            run_epoch(context, epoch)
        evaluate(context, 16)
        before, after = (evaluation_figures(context.chain, epoch)["heldout"]["sums"]["mean"] for epoch in (0, 16))
        gained.append(after - before)
    assert gained[0] > 0.12, gained
    # A random walk away from what was learned before lowers it.
    assert gained[1] < 0.06, gained
