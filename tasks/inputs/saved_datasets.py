"""Finds the files of folders that ``save_to_disk`` of datasets wrote, without that library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.errors import PromptError
from storage.names import below, part

#: Files that mark the folder of one dataset, and the folder of several splits.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
#: Limit on their size: usually a few kilobytes, a hundred with the names of a thousand files.
_MOST_BYTES = 1 << 22


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by ``save_to_disk``, as one dataset or with splits."""
    return (folder / _STATE).is_file() or (folder / _SPLITS).is_file()


def saved_files(folder: Path, split: str, where: str) -> list[Path]:
    """Return the Arrow files of a saved dataset, in order.

    Args:
        folder: see ``is_saved_dataset``.
        split: the split to read, where there are several.
        where: the setting that names the folder, for errors.

    Raises:
        PromptError: the folder has no such split, or is not in the format of ``save_to_disk``.
    """
    if (folder / _SPLITS).is_file():
        folder = _split_folder(folder, split, where)
    state = _read(folder / _STATE, where)
    if state.get("_indices_data_files"):
        raise PromptError(
            f"{where}: '{folder}' was saved with indices by an early version of datasets. Load it with "
            "datasets.load_from_disk() and save it with save_to_disk() again."
        )
    try:
        files = [below(folder, part(each["filename"])) for each in state["_data_files"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PromptError(f"{where}: '{folder / _STATE}' names no data files: {error}. {SAVE_AGAIN}") from None
    for file in files:
        if not file.is_file():
            raise PromptError(f"{where}: '{file}' does not exist, but '{_STATE}' next to it names it. {SAVE_AGAIN}")
    return files


#: Remedy for a damaged folder.
SAVE_AGAIN = "Save the dataset again with save_to_disk()."


def _split_folder(folder: Path, split: str, where: str) -> Path:
    listed = _read(folder / _SPLITS, where).get("splits")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if split not in names:
        section, of_run, _ = where.partition(".")
        remedy = f"Set {section}.split, or name" if of_run else "Name"
        raise PromptError(
            f"{where}: '{folder}' has no split '{split}'; it has {', '.join(names) or 'none'}. {remedy} "
            f"the folder of a split, as '{folder / (names[0] if names else 'train')}'."
        )
    try:
        return below(folder, part(split))
    except ValueError as error:
        raise PromptError(f"{where}: '{folder}': {error}. {SAVE_AGAIN}") from None


def _read(path: Path, where: str) -> dict[str, Any]:
    """Return the JSON object in a file; raise PromptError if it is missing, too large or malformed."""
    try:
        with path.open("rb") as opened:
            data = opened.read(_MOST_BYTES + 1)
        found = json.loads(data) if len(data) <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise PromptError(f"{where}: '{path}' cannot be read: {error}. {SAVE_AGAIN}") from None
    if not isinstance(found, dict):
        raise PromptError(f"{where}: '{path}' holds no JSON object of up to {_MOST_BYTES} bytes. {SAVE_AGAIN}")
    return found
