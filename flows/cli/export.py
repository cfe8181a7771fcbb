"""``flowmill export``: copies a run's model into a folder."""

from __future__ import annotations

from pathlib import Path

from configs.escaping import quoted
from flows.console import console
from tasks.export.copying import copy_export
from tasks.runs.addresses import model_address
from tasks.runs.opening import open_run


def export_command(model: str, to: Path, *, form: str, root: str) -> None:
    """Copy the exported model of RUN or RUN@EPOCH, or write its policy as a checkpoint; print the location.

    Raises:
        ConfigError: the address is malformed, or the target already exists.
        StoreError: there is no such run.
        NotCommittedError: the epoch was not exported, or not trained.
    """
    run, epoch = model_address(model)
    context = open_run(root, run, reads=True)
    if form == "dcp":
        from tasks.export.checkpoint import export_checkpoint

        names, left_out = export_checkpoint(context, epoch, to)
        for name in left_out:
            console.print(f"{name} is left out: torch's AdamW has no moments in 8 bits")
        console.print(f"{', '.join(names)} in {quoted(to)}")
        return
    console.print(f"{copy_export(context, epoch, to)} files in {quoted(to)}")
