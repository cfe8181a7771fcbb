"""The data of a run as tables for people: ingested samples, answers of raters, and fitted rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowmill.configs.human_units import size
from flowmill.tasks.export.provenance import accuracy_text, backbone_text, fitted_rewards
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.ratings.answers import answers_of
from flowmill.tasks.ratings.figures import rate_text, rating_report
from flowmill.tasks.runs.context import RunContext

#: Refused rows that are listed.
_LISTED = 50
Tables = dict[str, list[dict[str, Any]]]


def data_tables(context: RunContext) -> Tables:
    """Return tables by title, rows with equal columns: of ingested samples, preferences and fitted rewards, if any."""
    return {title: rows for title, rows in (*_ingested(context), *_preferences(context), *_fitted(context)) if rows}


def _ingested(context: RunContext) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    ingested = RunView(context).ingested()
    if ingested is None:
        return
    source = {"source": ingested.source, "rows": f"{ingested.rows} {ingested.kind}", "samples": ingested.samples}
    counts = {"prompts": ingested.prompts, "rows left out": len(ingested.refused), "stored": size(ingested.size)}
    yield "Given data", [{**source, **counts, "samples by license": ingested.license_text.removeprefix("licenses: ")}]
    listed = [{"row": place, "reason": reason} for place, reason in ingested.refused[:_LISTED]]
    more = f", the first {_LISTED} of {len(ingested.refused)}" if len(ingested.refused) > _LISTED else ""
    yield f"Rows left out{more}", listed


def _preferences(context: RunContext) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for question in dict.fromkeys(answer.question for answer in answers_of(context.run).values()):
        yield from _answered(context, question)


def _answered(context: RunContext, question: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    report, title = rating_report(context, question), f"Preferences ({question})" if question else "Preferences"
    names = {"winner": "preferred", "loser": "over", "source": "prompts of", "prompts": "prompts", "answers": "answers"}
    rate = "rate, 95 % interval"
    wins = [{**{name: row[key] for key, name in names.items()}, rate: rate_text(row)} for row in report["wins"]]
    yield f"{title}, win rates", wins
    warned = any(row["warning"] for row in report["raters"])
    shown = [key for key in report["raters"][0] if warned or key != "warning"]
    yield f"{title}, raters", [{key: row[key] for key in shown} for row in report["raters"]]
    yield f"{title}, agreement of raters", report["agreement"]


def _fitted(context: RunContext) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for section, _, metadata in fitted_rewards(context):
        data, results, title = metadata["data"], metadata["heldout"], f"Fitted reward {section.slot}"
        row = {"backbone": backbone_text(metadata), "fitted on": f"{data['train']} {data['kind']}"}
        yield title, [{**row, "held out": data["heldout"], "result": accuracy_text(metadata)}]
        yield f"{title}, calibration on held-out judgments", results["calibration"]
        yield f"{title}, raters", [{"rater": name, **figures} for name, figures in results["raters"].items()]
