"""The data of a run as tables for people: given samples, answers of raters, and fitted rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.human_units import size
from tasks.fitting.figures import accuracy_text
from tasks.fitting.provenance import backbone_text, fitted_rewards
from tasks.metrics.view import RunView
from tasks.ratings.answers import answers_of
from tasks.ratings.figures import rate_text, rating_report
from tasks.runs.context import RunContext

#: Refused rows that are listed.
_LISTED = 50
Tables = dict[str, list[dict[str, Any]]]


def data_tables(context: RunContext) -> Tables:
    """Return tables by title, rows with equal columns: of given samples, preferences and fitted rewards, if any.

    Raises:
        CorruptError: a record or a table is damaged.
    """
    return {title: rows for title, rows in (*_given(context), *_preferences(context), *_fitted(context)) if rows}


def _given(context: RunContext) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    found = RunView(context).given()
    if found is None:
        return
    about = {"source": found.source, "rows": f"{found.rows} {found.kind}", "samples": found.samples}
    counts = {"prompts": found.prompts, "rows left out": len(found.refused), "stored": size(found.size)}
    yield "Given data", [{**about, **counts, "samples by license": found.license_text.removeprefix("licenses: ")}]
    listed = [{"row": place, "reason": reason} for place, reason in found.refused[:_LISTED]]
    more = f", the first {_LISTED} of {len(found.refused)}" if len(found.refused) > _LISTED else ""
    yield f"Rows left out{more}", listed


def _preferences(context: RunContext) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    if not answers_of(context.run):
        return
    found = rating_report(context)
    names = {"winner": "preferred", "loser": "over", "source": "prompts of", "prompts": "prompts", "answers": "answers"}
    rate = "rate, 95 % interval"
    wins = [{**{name: row[key] for key, name in names.items()}, rate: rate_text(row)} for row in found["wins"]]
    yield "Preferences, win rates", wins
    warned = any(row["warning"] for row in found["raters"])
    shown = [key for key in found["raters"][0] if warned or key != "warning"]
    yield "Preferences, raters", [{key: row[key] for key in shown} for row in found["raters"]]
    yield "Preferences, agreement of raters", found["agreement"]


def _fitted(context: RunContext) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for section, _, about in fitted_rewards(context):
        data, found, title = about["data"], about["heldout"], f"Fitted reward {section.slot}"
        row = {"backbone": backbone_text(about), "fitted on": f"{data['train']} {data['kind']}"}
        yield title, [{**row, "held out": data["heldout"], "result": accuracy_text(about)}]
        yield f"{title}, calibration on held-out judgments", found["calibration"]
        yield f"{title}, raters", [{"rater": name, **figures} for name, figures in found["raters"].items()]
