"""``flowmill tiny``: a random miniature of a model family, to try a config with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from flowmill.configs.escaping import command, quoted
from flowmill.configs.load import read_config
from flowmill.configs.presets import config_file
from flowmill.flows.cli.error_reporting import say


def tiny_command(
    family: Annotated[str, typer.Argument(help="Model family, such as sd3 or flux1.", metavar="FAMILY")],
    to: Annotated[Path, typer.Argument(help="Folder to make.", metavar="DIR")],
    *,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights.", metavar="N")] = 0,
) -> None:
    """Write the folder, and print the section of a config that names it."""
    from flowmill.tasks.export.miniatures import write_miniature

    write_miniature(family, to, seed, say)
    # The preset has sizes that the miniature can draw.
    preset = read_config(config_file(f"tiny_{family}"))["model"]
    section = {"policy": family, "path": str(to)} | {name: preset[name] for name in preset if name != "build"}
    rest = command("flowmill", "presets", f"tiny_{family}")
    say(f"{quoted(to)}: random weights, which draw noise. The rest of a config: '{rest}'.")
    say(f"model: {yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=1000).strip()}")
