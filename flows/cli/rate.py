"""``flowmill rate``: people compare samples on a page, and the figures of their answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flows.cli.error_reporting import say
from flows.cli.http_server import serve
from flows.cli.options import AsJson, Root
from flows.console import console, print_json, print_table
from flows.environment import existing_root
from tasks.ratings.request import TOKEN, RateRequest

if TYPE_CHECKING:
    from tasks.ratings.figures import RatingReport
    from tasks.runs.context import RunContext


def rate_command(
    request: RateRequest,
    *,
    report: Annotated[bool, typer.Option("--report", help="Print the figures of the answers so far.")] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Serve the page until stopped, and make the answers an artifact then; with --report print their figures.

    Raises:
        StoreError: there is no such run, or nothing to compare.
        NotCommittedError: samples have not been made yet.
        ConfigError: other machines could use the page without a token, or the address is taken.
    """
    from tasks.runs.opening import open_run

    uri = existing_root(root)
    say(f"reading {uri}", quiet=as_json)
    context = open_run(uri, request.run, reads=True)
    if report:
        from tasks.ratings.figures import rating_report

        found = rating_report(context)
        print_json({"run": request.run, **asdict(found)}) if as_json else _print(found)
        return
    against = None if request.against is None else open_run(uri, request.against, reads=True)
    _serve(request, context, against)


def _serve(request: RateRequest, context: RunContext, against: RunContext | None) -> None:
    from tasks.execution.guard import OwnPagesOnly, access_token
    from tasks.ratings.answers import answers_of, commit_preferences
    from tasks.ratings.app import make_app
    from tasks.ratings.pairs import sources_of

    token = access_token(request.host, TOKEN, where="give it to raters")
    sources = sources_of(context, against, request.epoch, evaluation=request.evaluation, scorer=request.scorer)
    app = make_app(context.run, sources, request, token)
    try:
        serve(app if token else OwnPagesOnly(app), host=request.host, port=request.port, label="the page")
    finally:
        if any(answer.preferred is not None for answer in answers_of(context.run).values()):
            console.print(f"answers: {commit_preferences(context.run)}")


def _print(found: RatingReport) -> None:
    wins = Table("compared", "prompts of", "prompts", "answers", "win rate", "95 % interval", title="Win rates")
    for win in found.wins:
        low, high = win.rate.low, win.rate.high
        interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
        names = f"{win.winner} over {win.loser}"
        wins.add_row(names, win.source, str(win.prompts), str(win.answers), f"{win.rate.mean:.3f}", interval)
    print_table(wins)
    raters = Table("rater", "answers", "ties", "skipped", "left", "seconds", title="Raters")
    for each in found.raters:
        left = "" if each.left is None else f"{each.left:.2f}"
        raters.add_row(each.rater, str(each.answers), str(each.ties), str(each.skipped), left, f"{each.seconds:.1f}")
    print_table(raters)
    agreement = Table("raters", "pairs", "equal answers", "kappa", title="Agreement")
    for group in found.agreement:
        kappa = "" if group.kappa is None else f"{group.kappa:.3f}"
        agreement.add_row(", ".join(group.raters), str(group.pairs), f"{group.share:.3f}", kappa)
    if found.agreement:
        print_table(agreement)
    for warning in found.warnings:
        console.print(f"warning: {warning}")
