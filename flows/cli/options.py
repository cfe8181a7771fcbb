"""Arguments and options shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="Config file; presets are in configs/.", metavar="CONFIG")]
Root = Annotated[str | None, typer.Option("--root", help="Folder of the artifact store.", metavar="URI")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.", metavar="KEY=VALUE")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Long = Annotated[bool, typer.Option("--long", help="List everything: all epochs and columns, and names in full.")]
Stages = Annotated[list[str] | None, typer.Option("--stage", help="Only this stage.", metavar="STAGE")]
Epochs = Annotated[list[int] | None, typer.Option("--epoch", help="Only this epoch.", metavar="N")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
TrustStore = Annotated[
    bool, typer.Option("--trust-store", help="Run code and commands that only the store's record names.")
]
