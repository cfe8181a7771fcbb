"""Tasks for Label Studio and Argilla, and the answers in their exports of such tasks.

Both have the fields of ``RatingSession.tasks``. A choice is left, right, tie, bad or skip, or the name of a field;
stars and ranks are numbers by field.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flowmill.configs.errors import ConfigError, CorruptError, DataError, StoreError, listed
from flowmill.configs.escaping import quoted
from flowmill.configs.validation_messages import first_error
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.inputs.rows.read import source_rows
from flowmill.tasks.inputs.rows.row import Names
from flowmill.tasks.ratings.answers import RatingAnswer, answers_of, append_answer, check_answer
from flowmill.tasks.ratings.export import write_whole
from flowmill.tasks.ratings.groups import SampleSource
from flowmill.tasks.ratings.request import RateRequest
from flowmill.tasks.ratings.session import AnswerBody, RatingSession

_ALIASES = {"equal": "tie", "neither": "tie", "both bad": "bad", "both_bad": "bad"}


def write_tasks(run: RunFolder, sources: Sequence[SampleSource], request: RateRequest, file: Path) -> int:
    """Write the pairs or groups as a JSON list of tasks, and return their number."""
    tasks = RatingSession(run, sources, request).tasks()
    try:
        write_whole(file, json.dumps(tasks, ensure_ascii=False).encode())
    except OSError as error:
        raise ConfigError(f"--tasks: {quoted(file)} cannot be written: {error}. Choose another file.") from None
    return len(tasks)


def import_answers(
    run: RunFolder, sources: Sequence[SampleSource], request: RateRequest, file: Path
) -> tuple[int, int]:
    """Store the answers in an export, all or none; return how many are new, and how many were stored before."""
    session, problems, new = RatingSession(run, sources, request), list[str](), dict[Hashable, RatingAnswer]()
    before = {each.subject: each for each in answers_of(run, request.question).values()}
    for place, row in source_rows(str(file), "", "--import", Names()):
        try:
            if isinstance(row, DataError):
                raise row
            # As the tasks name their samples.
            found = [session.parsed(AnswerBody.model_validate(body), "") for body in _bodies(row)]
            for answer in found:
                check_answer(run, answer)
                earlier = new.get(answer.subject, before.get(answer.subject, answer))
                if _opinion(earlier) != _opinion(answer):
                    raise StoreError(
                        f"'{answer.rater}' has answered this otherwise before, in this file or on the page. Remove "
                        "the row, or undo the answer on the page"
                    )
                new[answer.subject] = answer
        except ValidationError as error:
            problems.append(f"{place}: {first_error(error)}")
        except (AttributeError, CorruptError, KeyError, StoreError, TypeError, ValueError) as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise DataError(f"{listed(problems)}\nNothing is stored. Correct or remove them.")
    for subject, answer in new.items():
        if subject not in before:
            append_answer(run, answer)
    return len(new.keys() - before.keys()), len(new.keys() & before.keys())


def _opinion(answer: RatingAnswer) -> object:
    """Return the answer itself, which does not depend on the order of the samples."""
    if answer.values:
        return dict(zip(answer.samples, answer.values, strict=True))
    preferred = answer.preferred
    if preferred is not None and answer.samples != answer.key:
        preferred = 1 - preferred
    return preferred, answer.both_bad


def _bodies(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers of a task as the page sends them."""
    if "annotations" in row and "data" in row:
        given = [each for each in row["annotations"] if not each.get("was_cancelled")]
        answers = [(each["completed_by"], each["result"], each.get("lead_time")) for each in given]
        for by, results, seconds in answers:
            rater = by.get("email") or by["id"] if isinstance(by, Mapping) else by
            values = [(each.get("to_name"), each["value"]) for each in results]
            yield _body(row["data"], rater, [_marked(name, value) for name, value in values], seconds)
    elif "responses" in row and "fields" in row:
        by_user: dict[Any, list[tuple[str, Any]]] = {}
        for question, responses in row["responses"].items():
            for each in responses:
                by_user.setdefault(each["user_id"], []).append((question, each["value"]))
        for user, results in by_user.items():
            yield _body({**row.get("metadata", {}), **row["fields"]}, user, results, None)
    else:
        raise ValueError("it has neither 'data' with 'annotations', as Label Studio, nor 'fields' with 'responses'")


def _marked(name: Any, value: Mapping[str, Any]) -> tuple[str, Any]:
    """Return a result of Label Studio as Argilla has it."""
    if "text" in value:
        return "note", " ".join(value["text"])
    mark = value["rating"] if "rating" in value else value.get("selected") or next(iter(value["choices"]), None)
    if mark is None:
        raise ValueError(f"the result '{name}' has no choice")
    return str(name), mark


def _body(task: Mapping[str, Any], rater: Any, results: Sequence[tuple[str, Any]], seconds: Any) -> dict[str, Any]:
    if rater in (None, ""):
        raise ValueError("it does not say who answered: 'completed_by' or 'user_id' is empty")
    body: dict[str, Any] = {"group": str(task.get("group")), "rater": str(rater), "seconds": seconds or 0.0}
    marks: dict[int, int] = {}
    for question, value in results:
        if question == "note":
            body["note"] = value
        elif isinstance(value, str):
            side = {"_0": "left", "_1": "right"}.get(value[-2:])
            body["choice"] = side or _ALIASES.get(value.lower(), value.lower())
        else:
            ranks = value if isinstance(value, list) else [{"value": question, "rank": value}]
            marks |= {int(each["value"].rpartition("_")[2]): each["rank"] for each in ranks}
    return body | ({"values": [marks[number] for number in sorted(marks)]} if marks else {})
