"""Copies an export to a user's folder: only the files that its record names."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.errors import ConfigError
from tasks.inputs.weight_sources import PIPELINE
from tasks.runs.context import RunContext


def copy_export(context: RunContext, epoch: int | None, to: Path) -> int:
    """Copy the exported model of a run, and return the number of its files.

    Args:
        context: the run.
        epoch: the epoch; the run's last when None.
        to: a folder that does not exist yet, or is empty.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
        NotCommittedError: the epoch was not exported.
    """
    wanted = context.config.run.epochs if epoch is None else epoch
    ref = context.chain.require(wanted, "export").ref
    record = context.store.shards(ref)[0]
    folder = context.store.folder(ref, record)
    names = [file.name for file in record.files if file.name.startswith(f"{PIPELINE}/")]
    with new_folder(to) as whole:
        for name in names:
            file = whole / name.removeprefix(f"{PIPELINE}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, file)
    return len(names)


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, and move it to ``to`` at the end.

    Args:
        to: a folder that does not exist yet, or is empty.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    target = to.expanduser().absolute()
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"--to '{to}' exists and is not empty. Name a folder that does not exist yet.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".flowmill-", dir=target.parent) as aside:
            whole = Path(aside) / "model"
            whole.mkdir()
            yield whole
            if target.exists():
                target.rmdir()
            whole.rename(target)
    except OSError as error:
        raise ConfigError(f"--to '{to}' cannot be written: {error.strerror}. Name another folder.") from None
