"""``flowmill export``: a run's model in a folder of yours."""

from __future__ import annotations

from pathlib import Path

from configs.visible import quoted
from flows.console import console
from tasks.export.copying import copy_export
from tasks.runs.addresses import model_address
from tasks.runs.opening import open_run


def export_command(model: str, to: Path, *, root: str) -> None:
    """Copy the exported model of RUN or RUN@EPOCH, and print where it is.

    Raises:
        ConfigError: the address is none, or something is in the way.
        StoreError: there is no such run.
        NotCommittedError: the epoch was not exported.
    """
    run, epoch = model_address(model)
    count = copy_export(open_run(root, run, reads=True), epoch, to)
    console.print(f"{count} files in {quoted(to)}")
