"""Folders that commands write for users, each as a whole; copies of exports, of which only recorded files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowmill.configs.errors import ConfigError
from flowmill.configs.user_directories import user_path
from flowmill.storage.backends.process_tags import is_gone, tag
from flowmill.tasks.inputs.weight_sources import PIPELINE
from flowmill.tasks.runs.context import RunContext

#: Prefix of folders in progress, which hold the tag of their process.
_ASIDE = ".flowmill-"


def exported_files(context: RunContext, epoch: int | None) -> dict[str, Path]:
    """Return the verified files of a run's export by name, the last one when ``epoch`` is None: only those that its
    commit names."""
    ref = context.chain.require(context.config.run.epochs if epoch is None else epoch, "export").ref
    record = context.store.shards(ref)[0]
    folder, below = context.store.folder(ref, record), f"{PIPELINE}/"
    names = sorted(file.name for file in record.files if file.name.startswith(below))
    return {name.removeprefix(below): folder / name for name in names}


def copy_export(context: RunContext, epoch: int | None, to: Path) -> int:
    """Copy the exported model of a run, and return the number of its files.

    Args:
        epoch: the epoch; the run's last when None.
        to: a folder that does not exist yet, or is empty.
    """
    files = exported_files(context, epoch)
    with new_folder(to) as whole:
        for name, file in files.items():
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, whole / name)
    return len(files)


def check_new_folder(to: Path, *, over: Sequence[str] = ()) -> None:
    """Check that ``new_folder`` may write a folder, before the work that fills it."""
    target = user_path(to).resolve()
    try:
        names = {file.name for file in target.iterdir()} if target.is_dir() else {""} if target.exists() else set()
        if names and not {*over[:1]} <= names <= {*over}:
            raise ConfigError(f"'{to}' exists and is not empty. Name a folder that does not exist yet.")
    except OSError as error:
        raise _unwritable(to, error) from None
    check_place(to)


def check_place(to: Path) -> None:
    """Check that a file or folder can be made, before the work that fills it."""
    target = user_path(to).resolve()
    try:
        near = next((each for each in target.parents if each.exists()), target)
        # Permissions alone do not say it, for example in /proc or on a full disk.
        (trial := near / f"{_ASIDE}{tag()}").mkdir()
        trial.rmdir()
    except OSError as error:
        raise _unwritable(to, error) from None


@contextmanager
def new_folder(to: Path, *, over: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder to fill, and move it to ``to`` at the end: a killed process leaves no part of it there.

    Args:
        to: a folder that does not exist yet, or is empty.
        over: names of files that may be in it, and are replaced, where the first of them is.
    """
    # The folder that a link leads to, on another disk maybe.
    target = user_path(to).resolve()
    try:
        check_new_folder(to, over=over)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        aside = target.parent / f"{_ASIDE}{tag()}"
        whole = aside / "whole"
        whole.mkdir(parents=True)
        try:
            yield whole
            if target == Path.cwd().resolve():
                # A shell would stay in a folder that is moved away.
                (aside / "before").mkdir()
                for source, place in ((target, aside / "before"), (whole, target)):
                    for file in sorted(source.iterdir()):
                        file.rename(place / file.name)
                return
            if target.exists():
                target.rename(aside / "before")
            whole.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise _unwritable(to, error) from None


def _unwritable(to: Path, error: OSError) -> ConfigError:
    return ConfigError(f"'{to}' cannot be written: {error.strerror or error}. Name another folder.")


def _remove_leftovers(parent: Path) -> None:
    """Remove the unfinished folders of killed processes."""
    for each in parent.glob(f"{_ASIDE}*"):
        if is_gone(each.name.removeprefix(_ASIDE)):
            shutil.rmtree(each, ignore_errors=True)
