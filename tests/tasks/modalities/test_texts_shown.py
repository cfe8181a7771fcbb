"""Texts of language models, wherever a run's samples are shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from streamlit.testing.v1 import AppTest

import flowmill
from flowmill.configs.escaping import visible
from flowmill.tasks.metrics.describe import describe_result
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.dataset import export_run
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.reports.report.reading import read_run
from flowmill.tasks.reports.sample_lines import sample_lines
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.tracking.tracker import Tracker
from tests.conftest import ROOT
from tests.support.inside import evaluate, evaluation_texts, prepare, run_epoch
from tests.support.language_models import texts_config

PAGE = str(ROOT / "flowmill" / "explorer" / "page.py")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """An epoch, evaluated before and after."""
    context = prepare(texts_config(tmp_path_factory.mktemp("texts"), "run.epochs=1"))
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    return context


@pytest.fixture(scope="module")
def run(context: RunContext) -> flowmill.Run:
    return flowmill.open(context.store.root.uri).run("texts")


def test_tables_and_traces_have_a_column_of_texts(run: flowmill.Run) -> None:
    for table in (run.samples(1), run.evaluation(1)):
        assert all(isinstance(text, str) for text in table.column("text").to_pylist())
    sample = run.samples(1).slice(5, 1).to_pylist()[0]
    assert run.trace(1, sample["sample_id"])["sample"]["text"] == sample["text"]


@pytest.mark.parametrize("form", ["parquet", "datasets"])
def test_exports_for_other_tools_have_them(context: RunContext, run: flowmill.Run, tmp_path: Path, form: str) -> None:
    export_run(context, tmp_path / form, form, epochs=[], progress=lambda done, total: None)
    table = pq.read_table(tmp_path / form / "train-00001.parquet")
    assert table.column("text").to_pylist() == run.samples(1).column("text").to_pylist()


def test_a_report_has_texts_before_and_after_and_the_best_and_worst(context: RunContext) -> None:
    report, page = read_run(context), run_report(context)
    before, after = (evaluation_texts(context, epoch) for epoch in (0, 1))
    assert {split: len(pairs) for split, pairs in report.pairs.items()} == {"train": 2, "heldout": 2}
    for number, pair in enumerate(report.pairs["heldout"]):
        for shot, text in ((pair.before, before["heldout"][number]), (pair.after, after["heldout"][number])):
            assert (shot.prompt, shot.text) == (text.prompt, text.text)
    assert "Held-out prompts, before and after" in page
    assert report.best
    assert all(shot.image is None and isinstance(shot.text, str) for shot in (*report.best, *report.worst))
    assert min(shot.reward for shot in report.best) > max(shot.reward for shot in report.worst)


@pytest.mark.slow
def test_mlflow_has_them_as_tables(context: RunContext) -> None:
    tracker = Tracker(context, orchestrator={})
    tracker.log_evaluation(1)
    assert tracker.close("FINISHED") is None
    (path,) = Path(context.store.root.uri).rglob("eval/heldout/texts_epoch_00001.json")
    logged = json.loads(path.read_text())
    assert logged["columns"] == ["prompt", "text", "verdict"]
    assert logged["data"][0][0] == evaluation_texts(context, 1)["heldout"][0].prompt


def test_a_line_has_prompt_text_and_score_of_a_sample(context: RunContext) -> None:
    first, second, *_ = evaluation_texts(context, 1)["heldout"]
    head, *lines = sample_lines(RunView(context), 1, 2)
    assert head == "samples after epoch 1, held-out prompts:"
    for line, text in zip(lines, (first, second), strict=True):
        assert line.endswith(f": {visible(text.prompt)} -> {visible(text.text) or '(empty)'}")
    assert next(sample_lines(RunView(context), 0, 1)) == "samples before training, held-out prompts:"


def test_the_summary_says_where_they_are(context: RunContext) -> None:
    places = describe_result(context)["texts"]
    assert all((Path(context.store.root.uri) / place).exists() for place in places.values())
    assert set(places) == {"train", "heldout"}


@pytest.mark.slow
def test_the_explorer_shows_them_below_their_prompts(run: flowmill.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [PAGE, run.store.root, "texts", ""])
    page = AppTest.from_file(PAGE, default_timeout=60).run()
    samples, before = (run.evaluation(epoch).to_pandas().set_index("sample_id") for epoch in (1, 0))
    assert not page.exception
    assert sorted(code.value for code in page.code) == sorted([*samples.text, *before.text])
    first = next(button for button in page.button if button.label == "Open")
    first.click().run()
    assert not page.exception
    assert page.code[-1].value == samples.text[first.key.removeprefix("open-")]
    assert len(page.code) == 2 * len(samples) + 2
    assert not [text for text in page.markdown if "stored state" in text.value]
