"""The commands and their Typer application."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from flowmill.configs.errors import ConfigError
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.reward import reward_app
from flowmill.flows.cli.store import store_app

#: Command -> its help. ``serve-reward`` is ``serve_reward_command`` in ``flows/cli/serve_reward.py``.
COMMANDS = {
    "run": "Run a training run, or continue it where it stopped: committed work is never computed again.",
    "init": "Copy a preset, with its comments and prompts, into your own folder for editing.",
    "tiny": "Write a random miniature of a model family into a folder, to try a config with.",
    "sweep": "Run variants of a config, which share artifacts if possible, and compare them; an interrupted sweep "
    "resumes.",
    "stage": "Run one stage of one epoch alone, optionally with other settings; nothing else is computed.",
    "serve-reward": "Serve one reward over HTTP until stopped, for runs in other processes.",
    "deploy": "Create Prefect deployments of the pipeline and the stages; settings not given stay unchanged "
    "on the server.",
    "worker": "Run a Prefect worker that executes deployments until stopped.",
    "check": "Check a config: print it with all defaults filled in, the cost of the run, and the memory it needs.",
    "status": "Show the runs of a store, or the fresh, stale and missing stages of one run, and its evaluations.",
    "diff": "Compare two runs: differing settings, shared artifacts, and evaluations.",
    "report": "Write the results of a run, or a comparison of several, as one self-contained HTML file.",
    "view": "Browse trajectories by prompt, reward and advantage, by group, and a sample's denoising chain by step.",
    "rate": "Compare pairs of samples on a page, blind, and print the figures of the answers: win rates, agreement.",
    "track": "Log a run to MLflow from its committed artifacts: all of it, or the records lost in an outage.",
    "publish": "Upload the exported model to the Hugging Face Hub. No other command uploads anything.",
    "export": "Copy the exported model of a run into a folder, or write its policy as a torch checkpoint.",
    "presets": "List the configs that come with flowmill: name, model, algorithm and memory.",
    "ui": "Serve the MLflow and Prefect UIs on the loopback interface until Ctrl-C.",
}
#: Commands that no longer exist, and what to do instead.
REMOVED = {
    "serve-rollout": "Ranks (execution.processes), Dask, Ray or a Prefect work pool share the shards of rollouts.",
    "benchmark": "Evaluate models with the same settings: flowmill stage evaluate --run RUN --epoch EPOCH --name NAME "
    "--set ...; 'flowmill sweep' compares configs.",
}


class Command(TyperCommand):
    """A command whose module is imported when its options are needed: a list of commands imports none."""

    @cached_property
    def loaded(self) -> Any:
        """The command with its options."""
        from flowmill.flows.cli.request_options import with_options

        stem = str(self.name).replace("-", "_")
        function = getattr(import_module(f"flowmill.flows.cli.{stem}"), f"{stem}_command")
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(self.name, help=self.help)(with_options(function))
        return get_command(single)

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Return the context of the command with its options."""
        return self.loaded.make_context(*arguments, **settings)


class Commands(TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        own = {name: Command(name, help=text) for name, text in COMMANDS.items()}
        super().__init__(**{**settings, "commands": {**own, **settings["commands"]}})

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        """Return the command of a command line; raise ConfigError if it no longer exists."""
        if arguments[0] in REMOVED:
            raise ConfigError(f"'flowmill {arguments[0]}' no longer exists. {REMOVED[arguments[0]]}")
        return super().resolve_command(context, arguments)


app = typer.Typer(
    cls=Commands,
    help="Post-train diffusion, flow-matching, language, vision-language and unified models with reinforcement "
    "learning, as a durable data pipeline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(store_app, name="store")
app.add_typer(reward_app, name="reward")


def _print_version(requested: bool) -> None:
    if requested:
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
