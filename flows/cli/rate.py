"""``flowmill rate``: people compare samples on a page, and the figures of their answers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.http_server import serve
from flowmill.flows.cli.options import AsJson, Root, TrustStore
from flowmill.flows.console import print_json, print_table
from flowmill.flows.environment import existing_root
from flowmill.tasks.ratings.request import TOKEN, RateRequest

if TYPE_CHECKING:
    from flowmill.tasks.ratings.groups import SampleSource
    from flowmill.tasks.runs.context import RunContext


def rate_command(
    request: RateRequest,
    *,
    report: Annotated[bool, typer.Option("--report", help="Print the figures of the answers so far.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the answers so far as .csv or .jsonl, and their images next to it."),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the pairs as JSON tasks for Label Studio or Argilla.")
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", help="Store the answers in a JSON export of such tasks."),
    ] = None,
    root: Root = None,
    trust_store: TrustStore = False,
    as_json: AsJson = False,
) -> None:
    """Serve the page until stopped, and make the answers an artifact then; or print figures, write or read a file."""
    from flowmill.tasks.ratings.exchange import import_answers, write_tasks
    from flowmill.tasks.runs.opening import open_run

    uri = existing_root(root)
    say(f"reading {uri}", quiet=as_json)
    context = open_run(uri, request.run, reads=True, trusted=trust_store)
    request = request.model_copy(update={"question": request.question or context.config.rate.question})
    if tasks is not None or answers is not None:
        sources = _sources(request, context, trust_store=trust_store)
        if answers is not None:
            stored, present = import_answers(context.run, sources, request, answers)
            say(f"stored {stored} answers of {answers}; {present} were stored before", quiet=as_json)
            _commit(request, context, quiet=as_json)
        if tasks is not None:
            say(f"wrote {write_tasks(context.run, sources, request, tasks)} tasks to {tasks}", quiet=as_json)
    if export is not None:
        from flowmill.tasks.ratings.export import export_answers

        count = export_answers(context.run, request.question, export)
        say(f"wrote {count} rows to {export}", quiet=as_json)
    if report:
        from flowmill.tasks.ratings.figures import rating_report

        figures = rating_report(context, request.question)
        if as_json:
            print_json({"run": request.run, **figures})
        for title, rows in () if as_json else figures.items():
            _print(title.capitalize(), rows)
    if not report and tasks is answers is export is None:
        _serve(request, context, _sources(request, context, trust_store=trust_store))


def _sources(request: RateRequest, context: RunContext, *, trust_store: bool) -> Sequence[SampleSource]:
    from flowmill.tasks.ratings.groups import sources_of
    from flowmill.tasks.runs.opening import open_run

    against = None
    if request.against is not None:
        against = open_run(context.store.root.uri, request.against, reads=True, trusted=trust_store)
    return sources_of(context, against, request.epoch, evaluation=request.evaluation, scorer=request.scorer)


def _serve(request: RateRequest, context: RunContext, sources: Sequence[SampleSource]) -> None:
    from flowmill.tasks.execution.guard import OwnPagesOnly, access_token
    from flowmill.tasks.ratings.app import make_app

    token = access_token(request.host, TOKEN, where="give it to raters")
    # A link of each start: raters know the address, and must not see how others answer.
    organizer = secrets.token_urlsafe(16)
    app = make_app(context.run, sources, request, token, organizer, context.config.rate.guidelines)
    rater = "" if request.rater is None else f"/?rater={quote(request.rater)}"
    labels = {"the organizer's page": f"/organizer.html#{organizer}", "the page": rater}
    try:
        serve(app if token else OwnPagesOnly(app), host=request.host, port=request.port, labels=labels)
    finally:
        _commit(request, context)


def _commit(request: RateRequest, context: RunContext, *, quiet: bool = False) -> None:
    from flowmill.tasks.ratings.answers import answers_of, commit_preferences, comparisons_of

    if comparisons_of(answers_of(context.run, request.question).values()):
        say(f"answers: {commit_preferences(context.run, request.question)}", quiet=quiet)


def _print(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(*(rows[0] if rows else ()), title=title)
    for row in rows:
        table.add_row(
            *("" if each is None else f"{each:.3g}" if isinstance(each, float) else str(each) for each in row.values())
        )
    if rows:
        print_table(table)
