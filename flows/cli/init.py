"""``flowmill init``: copies a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowmill.configs.escaping import command, quoted
from flowmill.configs.presets import copy_preset
from flowmill.flows.cli.error_reporting import say


def init_command(
    preset: Annotated[str, typer.Argument(help="Preset, such as digits.", metavar="PRESET")],
    to: Annotated[Path, typer.Option("--to", help="Folder; made if needed.", metavar="FOLDER")] = Path(),
) -> None:
    """Copy a preset, and print its files and the command that runs it."""
    first, *others = copy_preset(preset, to)
    for file in (first, *others):
        say(quoted(file))
    say(f"run it: {command('flowmill', 'run', first)}")
