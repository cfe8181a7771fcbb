"""Renders the table of alert rules."""

from __future__ import annotations

from flowmill.tasks.metrics.rules import RULES


def render() -> str:
    """Return the table, a row for each rule."""
    rows = [f"| `{rule.name}` | {rule.condition} | {rule.remedy} | {rule.source} |" for rule in RULES.values()]
    return "\n".join(["| rule | it fires when | remedy | source |", "|---|---|---|---|", *rows])
