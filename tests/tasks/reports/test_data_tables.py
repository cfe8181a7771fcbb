"""The data of a run wherever it is shown: given rows, rows left out, answers of raters, fitted rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowmill
from flowmill.configs.load import load_config
from flowmill.flows.cli.filters import EntryFilter
from flowmill.flows.cli.status_tables import print_run
from flowmill.models.rewards.fitted import ABOUT
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.export.provenance import data_section
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.metrics.tracked import paragraphs
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.ratings.answers import RatingAnswer, append_answer
from flowmill.tasks.reports.data_tables import data_tables
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.reports.report.samples import ingested_shots
from flowmill.tasks.runs.context import RunContext
from tests.support.given import pairs, write_jsonl
from tests.support.inside import evaluate, prepare, run_epoch, run_stage


def rate(context: RunContext, rater: str, preferred: float) -> RatingAnswer:
    """Prefer the first sample of the evaluation after training to the one before, or not."""
    first, second = (context.chain.require(epoch, "evaluate") for epoch in (1, 0))
    row = flowmill.open(context.store.root.uri).run(context.run.name).evaluation(1).to_pylist()[0]
    answer = RatingAnswer(
        prompt_id=row["prompt_id"],
        prompt=row["prompt"],
        first_artifact=first.artifact,
        first_sample=row["sample_id"],
        second_artifact=second.artifact,
        second_sample=row["sample_id"],
        preferred=preferred,
        rater=rater,
        seconds=1.0,
    )
    append_answer(context.run, answer)
    return answer


@pytest.fixture
def context(config_data: dict[str, Any], config_file: Path, tmp_path: Path) -> RunContext:
    """A run on given pairs, of which one names a file that is no image, and one has no prompt."""
    rows = [{**row, "license": "CC0" if number < 2 else "CC-BY-4.0"} for number, row in enumerate(pairs())]
    source = write_jsonl(tmp_path / "given", rows)
    (tmp_path / "given" / "1-rejected.png").write_bytes(b"no image")
    source.write_text(source.read_text() + "{}\n")
    data = {**config_data, "prompts": {"heldout": config_data["prompts"]["heldout"]}, "optimize": {"algorithm": "dpo"}}
    data["data"] = {"train": str(source), "chosen": "chosen", "rejected": "rejected", "bad_rows": "leave_out"}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(data))
    config = load_config(tmp_path / "given.yaml", ["run.epochs=1"])
    remember(config)
    found = prepare(config)
    evaluate(found, 0)
    run_epoch(found, 1)
    evaluate(found, 1)
    return found


def test_given_rows_and_those_left_out_are_shown(
    context: RunContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = RunView(context).ingested()
    assert given is not None
    assert (given.source, given.kind, given.rows, given.samples, given.prompts) == ("rows.jsonl", "pairs", 5, 10, 5)
    assert given.licenses == {"CC-BY-4.0": 8, "CC0": 2}
    (_, (place, reason)) = given.refused
    assert place == "rows.jsonl, line 2" or "line 2" in place
    assert "cannot be read" in reason
    assert str(tmp_path) not in place + reason
    tables = data_tables(context)
    assert [*tables] == ["Given data", "Rows left out"]
    assert tables == flowmill.open(context.store.root.uri).run("small").data()
    assert [shot.verdict for shot in ingested_shots(RunView(context))] == ["chosen", "rejected"] * 5
    html = run_report(context)
    for words in ("5 pairs", "1-rejected.png", "CC-BY-4.0 8, CC0 2", "Given samples"):
        assert words in html
    assert "Best samples" not in html, "ratings are no result of training"
    assert "(10 samples, 2 rows left out, 5 prompts, " in paragraphs(context, done=False)[0]
    print_run(describe_run(context), EntryFilter())
    assert "data: 10 samples of 7 rows, 2 rows left out" in capsys.readouterr().out


def test_answers_and_fitted_rewards_are_shown(context: RunContext, tmp_path: Path) -> None:
    rate(context, "ann", 1.0)
    rate(context, "bob", 0.0)
    about = {
        "backbone": {"name": "pixels"},
        "data": {"train": 8, "heldout": 4, "kind": "preferences"},
        "heldout": {
            "accuracy": {"mean": 0.75, "low": 0.5, "high": 0.9, "count": 4, "unit": "judgments"},
            "calibration": [{"count": 4, "predicted": 0.6, "observed": 0.5}],
            "raters": {"ann": {"judgments": 4, "agreement": 0.75}},
        },
    }
    (tmp_path / ABOUT).write_text(json.dumps(about))
    fitted = context.config.rewards[0].model_copy(update={"name": "fitted", "options": {"path": str(tmp_path)}})
    context.config = context.config.model_copy(update={"rewards": (fitted,)})
    tables = data_tables(context)
    (win,) = (row for row in tables["Preferences, win rates"] if row["over"].endswith("epoch 0"))
    assert (win["preferred"], win["answers"], win["rate, 95 % interval"]) == ("evaluation of epoch 1", 2, "0.500")
    assert tables["Preferences, agreement of raters"][0]["share"] == 0
    label = fitted.slot
    result = tables[f"Fitted reward {label}"][0]["result"]
    assert result == "held-out accuracy 0.750 (95 %: 0.500 to 0.900) over 4 judgments"
    assert tables[f"Fitted reward {label}, calibration on held-out judgments"][0]["observed"] == 0.5
    assert tables[f"Fitted reward {label}, raters"] == [{"rater": "ann", "judgments": 4, "agreement": 0.75}]


def test_the_card_of_an_export_says_what_a_policy_was_trained_on(context: RunContext, tmp_path: Path) -> None:
    accuracy = {"mean": 0.75, "low": 0.5, "high": 0.9, "count": 4, "unit": "judgments"}
    data = {"train": 8, "heldout": 4, "kind": "preferences", "judged": "images", "prompts": 6, "media": 24}
    about = {
        "backbone": {"name": "clip"},
        "data": {**data, "sources": {"judged.csv": 12}},
        "heldout": {"accuracy": accuracy, "raters": {"ann": {"judgments": 4, "agreement": 0.75}}},
        "lora": {"rank": 2},
    }
    (tmp_path / ABOUT).write_text(json.dumps(about))
    ref, seen = ArtifactRef("reward_models", "0" * 32), "preferences/1"

    def write(folder: Path) -> tuple[int, dict[str, Any]]:
        (folder / ABOUT).write_text(json.dumps(about))
        return 12, {}

    context.store.make(ref, "model", write, stage="reward_fit", stage_version=1, options={}, inputs=(seen,))
    run_stage(context, "export", 1)
    made = context.chain.require(1, "export").ref
    folder = context.store.folder(made, context.store.shards(made)[0])
    (card,) = folder.rglob("README.md")
    given = context.chain.require(0, "ingest").artifact
    assert (
        "## Data\n\n- Given samples: 5 pairs, 2 rows left out, 10 samples of 5 prompts (licenses: "
        f"CC-BY-4.0 8, CC0 2), `{given}`"
    ) in card.read_text().replace("\\", "")
    fitted = context.config.rewards[0].model_copy(update={"name": "fitted", "options": {"path": str(tmp_path)}})
    context.config = context.config.model_copy(update={"rewards": (fitted,)})
    text = data_section(context, 1).replace("\\", "")
    assert (
        f"- Reward `{fitted.slot}`: clip, LoRA of rank 2, fitted on 8 preferences of 6 prompts (24 images); held-out "
        "accuracy 0.750 (95 %: 0.500 to 0.900) over 4 judgments; 1 raters, held-out agreement 0.750 in 4; judgments: "
        f"judged.csv 12; `{ref}` from `{seen}`"
    ) in text
    assert "ann" not in text
