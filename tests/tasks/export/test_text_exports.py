"""Exports of language models: plain peft loads them, and runs that are equal but for names share their cards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowmill.configs.errors import ConfigError
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.weights.lora_files import PEFT_FILE
from flowmill.tasks.inputs.rows.row import dataset_id
from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.metrics import ingested
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages import export
from tests.support.inside import evaluate, prepare, run_epoch, run_stage, session_of, stage_run
from tests.support.language_models import texts_config

LORA = "model.lora={rank: 2, alpha: 4}"
GIVEN = ("prompts.train=null", "optimize.algorithm=sft")


def exported(folder: Path, *settings: str, epoch: int = 0) -> RunContext:
    """Return a run with the export of an epoch, which is made again where another run has made it."""
    context = prepare(texts_config(folder, *settings))
    for number in range(1, epoch + 1):
        run_epoch(context, number)
    stage_run(context, "export", epoch, force=True).execute()
    return context


def folder_of(context: RunContext, epoch: int = 0) -> Path:
    return exported_folder(context.store, context.chain.target(Node(epoch, "export")))


def card_of(context: RunContext, epoch: int = 0) -> str:
    return (folder_of(context, epoch) / "README.md").read_text()


def data_of(folder: Path, name: str) -> str:
    """Return the setting of given texts in a file of some name; all have the same."""
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1), "license": "CC0"} for a in range(1, 7)]
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"data={{train: {folder / name}, sample: answer}}"


def test_cards_hold_no_name_that_no_fingerprint_has(tmp_path: Path) -> None:
    run = exported(tmp_path, "run.name=first", LORA)
    assert card_of(run).count("# lm, post-trained with grpo\n\nTrained from `lm` with 0 epochs of `grpo`") == 1
    for name in ("one", "two"):
        shutil.copytree(folder_of(run), tmp_path / f"adapters {name}")
    cards: dict[str, list[str]] = {}
    for name, other in (("first", "one"), ("second", "two")):
        for case, settings in {
            "plain": [LORA],
            "start": [LORA, f"model.start={name}@0"],
            "adapters": [f"model.lora={{start: {tmp_path}/adapters {other}}}"],
            "data": [*GIVEN, data_of(tmp_path, f"{other}.jsonl")],
        }.items():
            own = name if case == "plain" else f"{case}-{name}"
            context = exported(tmp_path, f"run.name={own}", *settings)
            cards.setdefault(case, []).append(card_of(context))
            cards.setdefault(f"{case}, export", []).append(str(context.chain.require(0, "export").ref).split("-")[0])
    assert all(first == second for first, second in cards.values()), cards
    policy = run.policy_ref(0)
    assert f" Training started from the policy `{policy}`." in cards["start"][0]
    assert " Training began with trained adapters." in cards["adapters"][0]
    assert " of `sft` on 6 samples (licenses: CC0 6)." in cards["data"][0]


def test_cards_name_a_dataset_of_the_hub_which_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dataset_id("owner/name") == "owner/name"
    for name in ("/folder/name", "name.csv", "name.jsonl.gz"):
        assert dataset_id(name) is None
    of_file = folder_of(exported(tmp_path, *GIVEN, data_of(tmp_path, "one.jsonl")))
    for module in (export, ingested):
        monkeypatch.setattr(module, "dataset_id", lambda _: "owner/name")
    of_hub = exported(tmp_path, "run.name=hub", *GIVEN, data_of(tmp_path, "two.jsonl"))
    ids = {folder.parent.parent.name.partition("-")[0] for folder in (of_file, folder_of(of_hub))}
    assert len(ids) == 2, "the id counts"
    assert " of `sft` on 6 samples of owner/name (licenses: CC0 6)." in card_of(of_hub)


def test_adapters_of_the_head_leave_the_head_of_the_base_model_and_can_be_started_from(tmp_path: Path) -> None:
    context = exported(tmp_path, "model.lora={rank: 2, alpha: 4, targets: [q_proj, lm_head]}", epoch=1)
    folder, ids = folder_of(context, 1), torch.tensor([[1, 2, 3, 4]])
    tensors = load_file(folder / PEFT_FILE)
    assert {name.split(".")[-2] for name in tensors} == {"lora_A", "lora_B"}
    assert len([name for name in tensors if "lm_head" in name]) == 2
    policy = session_of(context).host.trainable(context.policy_ref(1)).policy
    assert isinstance(policy, CausalLM)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "lm"), folder)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, policy.forward(ids).logits)
    started = prepare(texts_config(tmp_path, "run.name=second", f"model.lora={{start: {folder}}}"))
    policies = [session_of(run).host.trainable(run.policy_ref(epoch)) for run, epoch in ((context, 1), (started, 0))]
    first, second = (each.state() for each in policies)
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    # As peft itself writes them.
    shutil.copytree(folder, tmp_path / "peft")
    own = {"base_model.model.lm_head.base_layer.weight": torch.ones(16, 96)}
    save_file(tensors | own, tmp_path / "peft" / PEFT_FILE)
    with pytest.raises(ConfigError, match="or save it without"):
        prepare(texts_config(tmp_path, "run.name=third", f"model.lora={{start: {tmp_path / 'peft'}}}"))


def test_cards_say_what_the_weights_are_where_the_base_model_lies_and_what_was_not_evaluated(tmp_path: Path) -> None:
    note = "`lm` is the folder of the base model; put it, or a link to it, here."
    card = card_of(exported(tmp_path, "run.name=adapters", LORA))
    assert f"```\n\n{note}\n\nThe policy after epoch 0 was not evaluated.\n" in card
    assert "| reward |" not in card
    assert "average" not in card
    context = prepare(texts_config(tmp_path, "optimize.ema={decay: 0.5}"))
    run_epoch(context, 1)
    evaluate(context, 1)
    run_stage(context, "export", 1)
    card = card_of(context, 1)
    mean = evaluation_figures(context.chain, 1)["heldout"][context.config.rewards[0].slot]["mean"]
    assert "with 1 epoch of `grpo`. The weights are the moving average of those trained.\n" in card
    assert "```\n\n| reward | prompts | before | after |\n|---|---|--:|--:|\n" in card
    assert f"| heldout | not evaluated | {mean:.3f} |\n" in card
    assert note not in card
