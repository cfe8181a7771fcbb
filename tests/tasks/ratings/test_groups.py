"""Stars, ranks, overlap, questions, the organizer's view, and files of answers that the readers of rows take."""

from __future__ import annotations

import csv
import json
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from typer.testing import CliRunner

from flowmill.configs.errors import ConfigError, DataError, StoreError
from flowmill.configs.schema import RateSection
from flowmill.flows.cli.app import app
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.transfer import copy_run
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.fitting import judgments
from flowmill.tasks.fitting.figures import equal_text
from flowmill.tasks.fitting.judgments import read_judgments
from flowmill.tasks.ratings.answers import answers_of, commit_preferences
from flowmill.tasks.ratings.app import make_app
from flowmill.tasks.ratings.exchange import import_answers, write_tasks
from flowmill.tasks.ratings.export import export_answers, write_whole, written
from flowmill.tasks.ratings.figures import rating_report
from flowmill.tasks.ratings.groups import RatedGroup, groups_of, sources_of
from flowmill.tasks.ratings.request import RateRequest
from flowmill.tasks.reports.data_tables import data_tables
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, open_run

KEY = {"authorization": "Bearer key"}


def asking(context: RunContext, token: str | None = None, **options: Any) -> TestClient:
    request = RateRequest(run="small", **options)
    sources = sources_of(context, None, request.epoch, evaluation=request.evaluation, scorer=request.scorer)
    return TestClient(make_app(context.run, sources, request, token, "key"))


def shown(client: TestClient, rater: str) -> Any:
    answer = client.get("/api/group", params={"rater": rater})
    assert answer.status_code == 200, answer.text
    return answer.json()


def answer(client: TestClient, rater: str, **what: Any) -> httpx.Response:
    group = shown(client, rater)["group"]
    return client.post("/api/answer", json={"group": group["name"], "rater": rater, "seconds": 1.0, **what})


def test_groups_of_a_prompt_share_a_sample(context: RunContext) -> None:
    (source,) = sources_of(context, None, 1, evaluation=False, scorer="jpeg_compressibility")
    scores = {(source.artifact, row["sample_id"]): row["score"] for row in source.rows}
    by_prompt: dict[str, list[RatedGroup]] = {}
    for group in groups_of([source], 0, 3):
        by_prompt.setdefault(group.prompt_id, []).append(group)
        of = [scores[sample] for sample in group.key]
        assert group.gap == max(of) - min(of)
    for first, second in by_prompt.values():
        assert (len(first.key), len(second.key), len({*first.key} & {*second.key})) == (3, 2, 1), "all 4 are connected"
    pairs = groups_of(sources_of(context, None, None, evaluation=False, scorer=None), 0, 6)
    assert sum(len(group.key) for group in pairs) == 2 * 16, "both samples of every replica, once"
    assert all(len({artifact for artifact, _ in group.key}) == 2 for group in pairs)


@pytest.mark.parametrize("scorer", [None, "length"])
def test_equal_texts_are_no_pair(scorer: str | None) -> None:
    def source(artifact: str, texts: list[str]) -> Any:
        fields = {"prompt_id": "p", "prompt": "p", "media_format": "", "score": 0.0}
        rows = [{**fields, "sample_id": text, "text": text, "replica": number} for number, text in enumerate(texts)]
        return Mock(artifact=artifact, rows=rows, scorer=scorer)

    (group,) = groups_of([source("evaluations/a", ["one", "two"]), source("evaluations/b", ["one", "2"])], 0)
    assert group.key == (("evaluations/a", "two"), ("evaluations/b", "2"))
    with pytest.raises(StoreError, match="No prompt has two samples to compare"):
        groups_of([source("evaluations/a", ["one"]), source("evaluations/b", ["one"])], 0)


def test_answers_on_equal_images_are_left_out_of_a_fit(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    client = asking(context)
    for _ in range(3):
        answer(client, "ann", choice="left")
    stored = commit_preferences(context.run)
    other = read_rows(context.store, stored).column("first_sample")[0].as_py()

    def drawn(store: Any, ref: Any, selected: set[str], judged: str) -> Any:
        return ((name, np.full((2, 2, 3), name == other and ref == first, np.uint8)) for name in selected)

    first = ArtifactRef.parse(read_rows(context.store, stored).column("first_artifact")[0].as_py())
    monkeypatch.setattr(judgments, "_samples", drawn)
    found = read_judgments([str(stored)], "images", scale=(1, 5), store=context.store)
    assert (len(found.rows), found.equal) == (1, 2)
    assert equal_text({"data": {"equal": 2, "judged": "images"}}) == ", and 2 of two equal images are left out"


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("task", ["compare", "stars"])
def test_an_empty_text_of_an_exported_answer_is_a_text(form: Any, task: str, tmp_path: Path) -> None:
    file, rest = tmp_path / f"answers.{form}", {"rater": "ann", "note": ""}
    if task == "stars":
        rows = [{"prompt": "p", "response": text, "rating": 3, **rest, "artifact": "a"} for text in ("", "no")]
    else:
        texts = [("", "no"), ("no", ""), ("yes", "no")]
        rows = [
            {"prompt": "p", "response_0": one, "response_1": two, "label_0": 1, **rest, "artifact_0": "a"}
            for one, two in texts
        ]
    file.write_bytes(written(rows, form))
    found = read_judgments([str(file)], "texts", scale=(1, 5), store=None)
    assert len(found.rows) == len(rows)
    assert {*found.media.values()} == ({"", "no"} if task == "stars" else {"", "no", "yes"})
    file.write_bytes(file.read_bytes().replace(b"artifact", b"x"))
    with pytest.raises(ConfigError, match="has no 'response"):
        read_judgments([str(file)], "texts", scale=(1, 5), store=None)


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "answers.csv"
    write_whole(file, b"before")

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as opened:
            opened.write(data[:1])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="full"):
        write_whole(file, b"after")
    assert file.read_bytes() == b"before"
    assert [*tmp_path.iterdir()] == [file]


def test_the_config_has_question_and_guidelines(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RateSection(question="Which has fewer errors?", guidelines="Count fingers.")
    begin_run(context.config.model_copy(update={"rate": own}))
    clients = list[TestClient]()
    monkeypatch.setattr("flowmill.flows.cli.rate.serve", lambda page, **options: clients.append(TestClient(page)))
    for options, question in ([], own.question), (["--question", "Which is red?"], "Which is red?"):
        command = ["rate", "small", *options, "--root", context.store.root.uri]
        assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
        clients[-1].headers.update({"host": "127.0.0.1"})
        told = clients[-1].get("/api/question").json()
        assert (told["question"], told["guidelines"]) == (question, own.guidelines)


@pytest.mark.parametrize(
    ("task", "values", "preferred"),
    [("stars", [5, 1, 5, 2], [1, 0.5, 1, 0, 0, 1]), ("rank", [2, 3, 1, 4], [1, 0, 1, 0, 1, 1])],
)
def test_stars_and_ranks_become_comparisons(
    task: str, values: list[int], preferred: list[float], context: RunContext
) -> None:
    client = asking(context, task=task, epoch=1)
    state = shown(client, "ann")
    assert (len(state["group"]["samples"]), state["total"]) == (4, 4)
    for wrong in ({"values": values[:2]}, {"values": [6, 1, 1, 1]}, {"values": [0, 1, 1, 1]}, {"choice": "left"}):
        refused = answer(client, "ann", **wrong)
        assert refused.status_code == 409
        assert "The answer is for another question" in refused.json()["detail"]
    assert answers_of(context.run) == {}, "nothing is stored"
    assert answer(client, "ann", values=values, note=" two hands ").status_code == 200
    assert answer(client, "ann", choice="skip").json()["done"] == 2
    (given, skipped) = answers_of(context.run).values()
    assert (given.values, given.note, skipped.skipped) == (tuple(values), "two hands", True)
    rows = read_rows(context.store, commit_preferences(context.run)).to_pylist()
    assert [row["preferred"] for row in rows] == preferred
    names = [sample for _, sample in given.samples]
    assert [(row["first_sample"], row["second_sample"]) for row in rows] == [*combinations(names, 2)]
    report = rating_report(context)
    assert (report["raters"][0]["answers"], report["raters"][0]["skipped"]) == (1, 1)
    target = ArtifactStore(f"{context.store.root.uri}-copy")
    copy_run(context.store, target, "small", progress=lambda *_: None)
    assert answers_of(open_run(target.root.uri, "small", reads=True).run) == answers_of(context.run)


def test_both_bad_is_a_tie_of_its_own(context: RunContext) -> None:
    client = asking(context)
    for choice in ("bad", "tie", "left"):
        assert answer(client, "ann", choice=choice).status_code == 200
    assert [(each.preferred, each.both_bad) for each in answers_of(context.run).values()] == [
        (0.5, True), (0.5, False), (1.0, False)
    ]  # fmt: skip
    (row,) = rating_report(context)["raters"]
    assert (row["answers"], row["ties"], row["both_bad"]) == (3, 2, 1)
    assert read_rows(context.store, commit_preferences(context.run)).column("preferred").to_pylist() == [0.5, 0.5, 1]


def test_raters_without_names_have_files_of_a_pattern(tmp_path: Path) -> None:
    lines = [f"p{number}" for number in range(4)]
    for number, each in enumerate(lines):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / f"{each}.png")
    for rater, stars in (("a", 1), ("b", 5)):
        rows = "".join(f"{each},{each}.png,{stars}\n" for each in lines)
        (tmp_path / f"by-{rater}.csv").write_text(f"prompt,image,rating\n{rows}")
    found = read_judgments([str(tmp_path / "by-*.csv")], "images", scale=(1, 5), store=None)
    assert len(found.rows) == 8


def test_questions_are_apart(context: RunContext, tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("Count <b>fingers</b>.\n", encoding="utf-8-sig")
    usual, own = asking(context), asking(context, question="Which has fewer errors?", guidelines=rules)
    assert usual.get("/api/question").json()["question"] == "Which one is better?"
    told = own.get("/api/question").json()
    assert (told["question"], told["guidelines"]) == ("Which has fewer errors?", "Count <b>fingers</b>.")
    stale = {"group": shown(usual, "ann")["group"]["name"], "rater": "ann", "choice": "left", "seconds": 1.0}
    refused = own.post("/api/answer", json=stale)
    assert refused.status_code == 409
    assert "The answer is for another question or other samples" in refused.json()["detail"]
    assert answers_of(context.run) == {}
    answer(own, "ann", choice="left")
    assert shown(usual, "ann")["done"] == 0
    with pytest.raises(StoreError, match="answers to other questions: --question 'Which has fewer errors"):
        rating_report(context)
    assert rating_report(context, "Which has fewer errors?")["raters"][0]["answers"] == 1
    assert "Preferences (Which has fewer errors?), raters" in data_tables(context)
    for bad in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ConfigError, match=r"--guidelines: .* cannot be read"):
            asking(context, guidelines=bad)


def test_each_pair_gets_as_many_answers_as_asked_for(context: RunContext) -> None:
    client = asking(context, overlap=2)
    raters, done = ["ann", "bob", "cy"], dict.fromkeys(["ann", "bob", "cy"], 0)
    names = {rater: shown(client, rater)["group"]["name"] for rater in raters}
    assert names["ann"] == names["bob"] != names["cy"], "two see it, so the third gets another"
    while any(shown(client, rater)["group"] for rater in raters):
        for rater in raters:
            if shown(client, rater)["group"]:
                done[rater] = answer(client, rater, choice="left").json()["done"]
    assert sum(done.values()) == 2 * 16
    overview = client.get("/api/organizer", headers=KEY).json()
    assert overview["progress"] == [{"raters": 2, "groups": 16, "complete": True}]
    assert shown(client, "dee") == {"rater": "dee", "done": 0, "skipped": 0, "total": 0, "group": None}
    client.post("/api/undo", json={"rater": "ann"})
    assert shown(client, "dee")["group"] is not None, "ann, who sees the pair of the withdrawn answer, may be gone"


def test_pairs_of_raters_who_are_gone_are_shown_to_others_in_the_end(context: RunContext) -> None:
    client = asking(context, overlap=1)
    gone = [shown(client, rater)["group"]["prompt"] for rater in ("ann", "cy")]
    prompts = list[str]()
    while (state := shown(client, "bob"))["group"]:
        prompts.append(state["group"]["prompt"])
        answer(client, "bob", choice="tie")
    assert (len(prompts), prompts[-2:]) == (16, gone), "the first that was shown comes first"
    assert state["total"] == 16
    assert shown(client, "dee")["group"] is None
    overview = client.get("/api/organizer", headers=KEY).json()
    assert overview["progress"] == [{"raters": 1, "groups": 16, "complete": True}]


def test_the_organizer_sees_progress_and_disputes_and_raters_do_not(context: RunContext) -> None:
    client = asking(context, token="secret")
    token = {"authorization": "Bearer secret"}
    for path in ("/api/organizer", "/api/%6Frganizer", "/api/organizer/export?form=csv"):
        for headers in ({}, token):
            refused = client.get(path, headers=headers)
            assert refused.status_code == 401
            assert "needs the link that 'flowmill rate' printed" in refused.json()["detail"]
    empty = client.get("/api/organizer", headers=KEY).json()
    assert empty["progress"] == [{"raters": 0, "groups": 16}]
    assert "raters" not in empty
    client.headers.update(token)
    # The sides of a pair are drawn for each rater: the first pair is disputed, the second is not.
    for rater in ("ann", "bob"):
        for wish in (rater, "both"):
            state = shown(client, rater)
            media = [sample["media"] for sample in state["group"]["samples"]]
            best = (min if wish in ("ann", "both") else max)(media)
            answer(client, rater, choice="left" if media[0] == best else "right", note=f"<i>{rater}</i>")
    view = client.get("/api/organizer", headers=KEY).json()
    assert view["progress"] == [{"raters": 0, "groups": 14}, {"raters": 2, "groups": 2}]
    assert [each["rater"] for each in view["raters"]] == ["ann", "bob"]
    assert view["agreement"][0]["share"] == 0.5
    (dispute,) = view["disputed"]
    assert {vote["rater"]: vote["vote"] for vote in dispute["votes"]} in (
        {"ann": "first", "bob": "second"}, {"ann": "second", "bob": "first"}
    )  # fmt: skip
    assert client.get(f"/{dispute['samples'][0]['media']}", headers=KEY).headers["content-type"] == "image/png"
    assert [note["note"] for note in view["notes"]] == ["<i>ann</i>"] * 2 + ["<i>bob</i>"] * 2
    rows = client.get("/api/organizer/export?form=jsonl", headers=KEY).text.splitlines()
    assert len(rows) == 4


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("task", ["compare", "stars"])
def test_a_file_of_answers_is_read_by_fits(form: str, task: str, context: RunContext, tmp_path: Path) -> None:
    client, file = asking(context, task=task, epoch=1, group=4), tmp_path / f"answers.{form}"
    stars: list[dict[str, Any]] = [{"values": [5, 1, 3, 3]}] * 3
    for each in stars if task == "stars" else [{"choice": each} for each in ("left", "right", "bad")]:
        assert answer(client, "ann", note='=cmd|" /C calc"!A0', **each).status_code == 200
    answer(client, "ann", choice="skip")
    command = ["rate", "small", "--export", str(file), "--root", context.store.root.uri]
    assert f"wrote {12 if task == 'stars' else 3} rows to {file}" in CliRunner().invoke(app, command).output
    judgments = read_judgments([str(file)], "images", scale=(1, 5), store=context.store)
    assert judgments.rated is (task == "stars")
    # The preferred sample comes first.
    assert [row.value for row in judgments.rows] == ([5, 1, 3, 3] * 3 if task == "stars" else [1, 1, 0.5])
    assert {row.rater for row in judgments.rows} == {"ann"}
    stored = read_judgments([str(commit_preferences(context.run))], "images", scale=(1, 5), store=context.store)
    if task == "compare":
        assert [(row.items, row.prompt) for row in judgments.rows] == [
            (row.items[:: 1 if row.value else -1], row.prompt) for row in stored.rows
        ]
    assert {*judgments.media} == {*stored.media}
    lines = file.read_text(encoding="utf-8")
    rows = (
        list(csv.DictReader(lines.splitlines())) if form == "csv" else [json.loads(line) for line in lines.splitlines()]
    )
    assert rows[0]["note"] == ("'" if form == "csv" else "") + '=cmd|" /C calc"!A0'
    for wrong, message in (("answers.txt", "neither .csv nor .jsonl"), ("no/answers.csv", "cannot be written")):
        with pytest.raises(ConfigError, match=message):
            export_answers(context.run, "", tmp_path / wrong)


def _label_studio(task: Any, number: int, value: dict[str, Any], **more: Any) -> dict[str, Any]:
    result = [{"type": "any", "from_name": "any", "to_name": name, "value": each} for name, each in value.items()]
    return {
        "id": number,
        "data": task,
        "annotations": [{"completed_by": 7, "lead_time": 2.5, "result": result, **more}],
    }


def _argilla(task: Any, **answers: Any) -> dict[str, Any]:
    responses = {name: [{"value": value, "user_id": "u-1"}] for name, value in answers.items()}
    group = {"group": task["group"]}
    fields = {name: value for name, value in task.items() if name != "group"}
    return {"id": "r", "status": "completed", "fields": fields, "metadata": group, "responses": responses}


def test_answers_of_other_programs_are_imported_all_or_none(context: RunContext, tmp_path: Path) -> None:
    sources, request = sources_of(context, None, None, evaluation=False, scorer=None), RateRequest(run="small")
    tasks, file = tmp_path / "tasks.json", tmp_path / "export.json"
    assert write_tasks(context.run, sources, request, tasks) == 16
    first, second, third, *_ = json.loads(tasks.read_text())
    assert first["image_0"].startswith("data:image/png;base64,")
    rows = [
        _label_studio(first, 1, {"image_0,image_1": {"selected": "right"}, "x": {"text": ["blurred"]}}),
        _label_studio(second, 2, {"x": {"choices": ["Both bad"]}}, was_cancelled=True),
        _argilla(second, better="image_0", note="sharp"),
        _argilla(third, better="tie"),
    ]
    command = ["rate", "small", "--root", context.store.root.uri, "--import", str(file)]
    for bad, message in (
        (_argilla({**third, "group": "0" * 32}, better="tie"), "row 5: The answer is for another question"),
        (_argilla(third, better="green"), "row 5: choice: Input should be 'left'"),
        (
            _label_studio(third, 5, {"image_0": {"rating": 4}, "image_1": {"rating": 2}}),
            "row 5: The answer is for another",
        ),
        ({"prompt": "x"}, "row 5: it has neither 'data' with 'annotations'"),
        ({"data": first, "annotations": [{"result": []}]}, "row 5: "),
        (_label_studio(third, 5, {"x": {"choices": []}}), "row 5: the result 'x' has no choice"),
        (
            _label_studio(third, 5, {"x": {"choices": ["left"]}}, completed_by=None),
            "row 5: it does not say who answered",
        ),
        (
            {**_argilla(third), "responses": {"better": [{"value": "tie", "user_id": None}]}},
            "row 5: it does not say who answered",
        ),
    ):
        file.write_text(json.dumps([*rows, bad]))
        with pytest.raises(DataError, match="Nothing is stored") as error:
            import_answers(context.run, sources, request, file)
        assert message in str(error.value)
        assert answers_of(context.run) == {}
    file.write_text(json.dumps(rows))
    assert f"stored 3 answers of {file}; 0 were stored before" in CliRunner().invoke(app, command).output
    again = CliRunner().invoke(app, command).output
    assert f"stored 0 answers of {file}; 3 were stored before" in again
    assert f"answers: {commit_preferences(context.run)}" in again
    corrected = _argilla(second, better="image_1", note="sharp")
    twice = _label_studio(third, 9, {"x": {"choices": ["left"]}})
    twice["annotations"] += _label_studio(third, 9, {"x": {"choices": ["right"]}})["annotations"]
    cases = (([corrected, *rows], "row 1: 'u-1'"), ([rows[2], corrected], "row 2: 'u-1'"), ([twice], "row 1: '7'"))
    for changed, place in cases:
        file.write_text(json.dumps(changed))
        with pytest.raises(DataError, match=f"{place} has answered this otherwise before"):
            import_answers(context.run, sources, request, file)
    found = [(each.rater, each.preferred, each.note, each.seconds) for each in answers_of(context.run).values()]
    assert found == [("7", 0.0, "blurred", 2.5), ("u-1", 1.0, "sharp", 0.0), ("u-1", 0.5, "", 0.0)]


def test_answers_are_imported_before_figures_and_files(context: RunContext, tmp_path: Path) -> None:
    sources, request = sources_of(context, None, None, evaluation=False, scorer=None), RateRequest(run="small")
    tasks, file, table = (tmp_path / name for name in ("tasks.json", "export.json", "answers.csv"))
    write_tasks(context.run, sources, request, tasks)
    first, *_ = json.loads(tasks.read_text())
    tasks.unlink()
    file.write_text(json.dumps([_argilla(first, better="image_0")]))
    options = ["--import", str(file), "--tasks", str(tasks), "--export", str(table), "--report", "--json"]
    done = CliRunner().invoke(
        app, ["rate", "small", *options, "--root", context.store.root.uri], catch_exceptions=False
    )
    assert [row["answers"] for row in json.loads(done.output)["raters"]] == [1]
    assert len(table.read_text().splitlines()) == 2
    assert tasks.exists()


def test_stars_and_ranks_of_other_programs_are_imported(context: RunContext, tmp_path: Path) -> None:
    sources, file = sources_of(context, None, 1, evaluation=False, scorer=None), tmp_path / "export.json"
    for task in ("stars", "rank"):
        request = RateRequest(run="small", task=task, epoch=1)
        write_tasks(context.run, sources, request, file)
        first, second, *_ = json.loads(file.read_text())
        order = [{"value": f"image_{number}", "rank": rank} for number, rank in ((2, 1), (0, 2), (1, 4), (3, 3))]
        marks = {f"image_{number}": {"rating": value} for number, value in ((3, 4), (1, 2), (0, 1), (2, 3))}
        rows = [_label_studio(first, 1, marks), _argilla(second, ranking=order)]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        import_answers(context.run, sources, request, file.rename(tmp_path / f"{task}.jsonl"))
        found = [each.values for each in answers_of(context.run).values() if each.task == task]
        assert found == [(1, 2, 3, 4), (2, 4, 1, 3)]
