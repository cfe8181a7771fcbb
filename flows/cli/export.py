"""``flowmill export``: a run's model in a folder of yours."""

from __future__ import annotations

from pathlib import Path

from configs.errors import ConfigError
from flows.console import console
from tasks.export.copying import copy_export
from tasks.runs.opening import open_run


def export_command(model: str, to: Path, *, root: str) -> None:
    """Copy the exported model of RUN or RUN@EPOCH, and print where it is.

    Raises:
        ConfigError: the address is none, or something is in the way.
        StoreError: there is no such run.
        NotCommittedError: the epoch was not exported.
    """
    run, at, epoch = model.partition("@")
    if at and not epoch.isdecimal():
        raise ConfigError(f"'{model}' is no address of a model: '{epoch}' is no epoch. Write RUN, or RUN@EPOCH.")
    context = open_run(root, run, reads=True)
    count = copy_export(context, int(epoch) if at else None, to)
    console.print(f"{count} files in {to}", markup=False)
