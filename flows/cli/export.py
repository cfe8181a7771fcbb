"""``flowmill export``: copies a run's model into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowmill.configs.escaping import quoted
from flowmill.flows.cli.best import chosen_epoch
from flowmill.flows.cli.options import Root, TrustStore
from flowmill.flows.console import console
from flowmill.flows.environment import existing_root


def export_command(
    model: Annotated[
        str, typer.Argument(help="Run, RUN@EPOCH, or RUN@best: best by held-out score.", metavar="RUN[@EPOCH]")
    ],
    *,
    to: Annotated[Path, typer.Option("--to", help="Folder to make.", metavar="DIR")],
    form: Annotated[
        Literal["model", "dcp"],
        typer.Option("--format", help="model, for diffusers; dcp: weights and optimizer, for torch."),
    ] = "model",
    root: Root = None,
    trust_store: TrustStore = False,
) -> None:
    """Copy the exported model of RUN, RUN@EPOCH or RUN@best, or write its policy as a checkpoint; print the location.

    The best epoch is that with the highest score of the run's own evaluations, see ``flowmill.tasks.metrics.best``.
    """
    uri = existing_root(root)
    from flowmill.tasks.export.copying import copy_export
    from flowmill.tasks.runs.addresses import model_address
    from flowmill.tasks.runs.opening import open_run

    run, named = model_address(model)
    context = open_run(uri, run, reads=True, trusted=trust_store)
    epoch = chosen_epoch(context, named)
    if form == "dcp":
        from flowmill.tasks.export.checkpoint import export_checkpoint

        names, left_out = export_checkpoint(context, epoch, to)
        for name in left_out:
            console.print(f"{name} is left out: torch's AdamW has no moments in 8 bits")
        console.print(f"{', '.join(names)} in {quoted(to)}")
        return
    console.print(f"{copy_export(context, epoch, to)} files in {quoted(to)}")
