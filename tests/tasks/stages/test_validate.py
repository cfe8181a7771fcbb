"""The loss on held-out rows of given data: what it is, that it changes nothing else, and where it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowmill.configs.errors import ConfigError, DataError
from flowmill.configs.load import load_config, parse_config
from flowmill.flows.cli.filters import EntryFilter
from flowmill.flows.cli.status_tables import print_run
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.stage_selection import named_stages
from flowmill.tasks.specs.graph import HELD_OUT, Node
from tests.support.given import pairs, picture, rated, singles, write_jsonl
from tests.support.inside import evaluate, prepare, run_epoch, run_stage
from tests.support.language_models import texts_data

Begin = Callable[..., RunContext]
TIMES = {"times": {"count": 2}}
FORMS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "sft": (singles(), {}),
    "dpo": (pairs(), {"chosen": "chosen", "rejected": "rejected"}),
    "kto": (rated(), {"rating": "stars", "scale": (1, 5)}),
}


@pytest.fixture
def begin(config_data: dict[str, Any], config_file: Path, tmp_path: Path) -> Begin:
    """Prepares a run on the first four rows of a form, of which the other two are held out."""

    def made(algorithm: str, *, heldout: bool = True, **settings: Any) -> RunContext:
        rows, section = FORMS[algorithm]
        given = {"train": str(write_jsonl(tmp_path / "train", rows[:4])), **section}
        if heldout:
            given["heldout"] = str(write_jsonl(tmp_path / "heldout", rows[4:]))
        data = {**config_data, "data": given, "prompts": {"heldout": config_data["prompts"]["heldout"]}}
        options = TIMES if algorithm == "sft" else {**TIMES, "beta": 20}
        data["optimize"] = {"learning_rate": 1e-3, "algorithm": {"name": algorithm, "options": options}, **settings}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
        config = load_config(tmp_path / "run.yaml", [f"store.root={tmp_path / f'store-{heldout}'}"])
        remember(config)
        return prepare(config)

    return made


def losses(context: RunContext) -> dict[int, dict[str, float]]:
    return {epoch: figures for epoch, _, figures in RunView(context).summaries("validate")}


def validate(context: RunContext, epoch: int) -> None:
    run_stage(context, "validate", epoch)


def test_the_loss_is_the_algorithms_and_training_stays_as_it_is(begin: Begin) -> None:
    context = begin("kto")
    validate(context, 0)
    run_epoch(context, 1)
    validate(context, 1)
    before, after = losses(context)[0], losses(context)[1]
    assert before.keys() == after.keys()
    assert after["loss"] != before["loss"]
    # The base model is compared with itself.
    assert (before["gain"], before["loss"]) == (0.0, 0.5)
    samples = context.store.require(context.chain.ref(Node(0, "ingest", HELD_OUT))).summary["samples"]
    manifest = context.store.require(context.chain.ref(Node(1, "validate")))
    assert manifest.rows == 2 * samples, "two noise levels of each"
    forwards = check_config(context.config, rewards=False).validate_forwards
    assert forwards == 4 * manifest.rows, "policy and base model, under own and other prompts"
    plain = begin("kto", heldout=False)
    assert check_config(plain.config, rewards=False).validate_forwards == 0
    run_epoch(plain, 1)
    assert plain.policy_ref(1) == context.policy_ref(1)
    assert plain.store.require(plain.policy_ref(1)).digest == context.store.require(context.policy_ref(1)).digest
    assert not [node for node in plain.chain.nodes() if node.stage == "validate"]
    with pytest.raises(ConfigError, match=r"Set data\.heldout"):
        plain.chain.identity(Node(0, "validate"))


def test_draws_are_those_of_every_epoch_and_figures_are_shown(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    # Too small a step to change a weight.
    context = begin("dpo", learning_rate=1e-30)
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    assert losses(context)[0] == losses(context)[1]
    assert named_stages(context, Node(1, "validate")) == [Node(1, "validate")]
    assert named_stages(context, Node(0, "ingest")) == [Node(0, "ingest"), Node(0, "ingest", HELD_OUT)]
    points = [row for row in RunView(context).curves().to_pylist() if row["key"] == "heldout/loss"]
    assert [(row["step"], row["value"]) for row in points] == [
        (epoch, pytest.approx(math.log(2), abs=1e-6)) for epoch in (0, 1)
    ]
    assert "Loss on held-out rows" in run_report(context)
    print_run(describe_run(context), EntryFilter())
    shown = capsys.readouterr().out
    assert "held-out rows" in shown
    assert "0.693" in shown


def test_rows_of_both_sides_are_refused(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = singles()
    for leak in ({"prompt": rows[5]["prompt"].upper(), "image": picture(50)}, {"prompt": "new", "image": picture(5)}):
        monkeypatch.setitem(FORMS, "sft", ([*rows[:3], leak, *rows[4:]], {}))
        with pytest.raises(DataError, match=r"line 4 has a prompt or sample of data\.heldout"):
            begin("sft")
        monkeypatch.setitem(FORMS, "sft", ([*rows[:3], leak, *rows[4:]], {"bad_rows": "leave_out"}))
        given = RunView(begin("sft")).ingested()
        assert given is not None
        assert (given.samples, len(given.refused)) == (3, 1)
    monkeypatch.setitem(FORMS, "sft", ([*rows[:4], {"prompt": "x"}], {}))
    with pytest.raises(DataError, match=r"data\.heldout.*has no 'image'"):
        begin("sft")


def test_texts_have_a_loss_per_token(tmp_path: Path) -> None:
    data, rows = texts_data(tmp_path), [{"prompt": f"{each}+1=", "text": str(each + 1)} for each in range(1, 5)]
    files = {name: write_jsonl(tmp_path / name, part) for name, part in (("train", rows[:2]), ("heldout", rows[2:]))}
    data["data"] = {"sample": "text", **{name: str(file) for name, file in files.items()}}
    data["prompts"] = {"heldout": data["prompts"]["heldout"]}
    data["optimize"] = {"algorithm": "sft"}
    config = parse_config(data, where="here")
    remember(config)
    context = prepare(config)
    validate(context, 0)
    (figures,) = losses(context).values()
    assert figures["loss"] == pytest.approx(figures["nll"], rel=1e-5)
    # Of one digit and the end of the text.
    assert figures["length"] == 2
    assert check_config(config, rewards=False).validate_forwards == 2
