"""The Typer application of all commands."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.error_reporting import say
from flows.cli.store import store_app

app = typer.Typer(
    help="Post-train diffusion, flow-matching and causal language models with reinforcement learning, "
    "as a durable data pipeline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(store_app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            say(f"flowmill {version('flowmill')}")
        except PackageNotFoundError:
            say("flowmill, run from a folder where it is not installed")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Handle the options that all commands share."""
