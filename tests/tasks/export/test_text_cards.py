"""Cards of language models: what they say of a run, and that runs that are one but for names share them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from tests.support.inside import prepare, run_epoch, stage_run
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
