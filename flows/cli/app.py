"""The commands and their Typer application."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from flows.cli.error_reporting import say
from flows.cli.options import with_options
from flows.cli.store import store_app

#: Command -> its help. ``serve-reward`` is ``serve_reward_command`` in ``flows/cli/serve_reward.py``.
COMMANDS = {
    "run": "Run a training run, or continue it where it stopped: committed work is never computed again.",
    "init": "Copy a preset, with its comments and prompts, into your own folder for editing.",
    "sweep": "Run variants of a config, which share artifacts if possible, and compare them; an interrupted sweep "
    "resumes.",
    "stage": "Run one stage of one epoch alone, optionally with other settings; nothing else is computed.",
}


class Command(TyperCommand):
    """A command whose module is imported when its options are needed: a list of commands imports none."""

    @cached_property
    def loaded(self) -> Any:
        """The command with its options."""
        stem = str(self.name).replace("-", "_")
        function = getattr(import_module(f"flows.cli.{stem}"), f"{stem}_command")
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(self.name, help=self.help)(with_options(function))
        return get_command(single)

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Return the context of the command with its options."""
        return self.loaded.make_context(*arguments, **settings)


class Commands(TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        """Put the commands before the groups that Typer found."""
        own = {name: Command(name, help=text) for name, text in COMMANDS.items()}
        super().__init__(**{**settings, "commands": {**own, **settings["commands"]}})


app = typer.Typer(
    cls=Commands,
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
