"""The files of rows in a folder, here or on S3: a saved dataset, images with texts or a list of them, or tables.

A snapshot of a dataset of the hub is a folder of tables.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from flowmill.configs.errors import DataError
from flowmill.configs.folders import files_below
from flowmill.storage.names import inside, part
from flowmill.tasks.inputs.rows.bounds import too_many_bytes
from flowmill.tasks.inputs.rows.remote import is_remote, remote_data, remote_sizes
from flowmill.tasks.inputs.rows.row import LINES, MEDIA, OTHERS, ending_of, is_of_mac, placed

#: Files that mark the folder of one dataset, and the folder of several splits, of ``save_to_disk``.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
#: Files that list the images of a folder, as in datasets.
LISTS = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
#: Other files of datasets that hold no rows.
_ABOUT = (_STATE, _SPLITS, "dataset_info.json", "dataset_infos.json")
#: Suffixes of the texts of images.
CAPTIONS = (".txt", ".caption")
#: Names of splits in names of files.
_NAMES = {"train", "test", "validation", "valid", "val", "dev", "eval"}
#: Limit on the size of files about a folder.
_MOST_BYTES = 1 << 22
#: Remedy for a damaged folder of ``save_to_disk``.
SAVE_AGAIN = "Save the dataset again with save_to_disk()."


class Folder:
    """The files of a folder, but for hidden ones."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")

    @cached_property
    def names(self) -> list[str]:
        """Sorted names of all files below it."""
        names = sorted(self._sizes) if is_remote(self.path) else files_below(Path(self.path))
        return [name for name in names if not is_of_mac(name) and not name.startswith(".") and "/." not in name]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return remote_sizes(self.path)

    def has(self, name: str) -> bool:
        """Return whether there is a file."""
        return name in self.names if is_remote(self.path) else (Path(self.path) / name).is_file()

    def data(self, name: str, most: int = _MOST_BYTES) -> bytes:
        """Return the content of a file; raise ValueError if it is too large, and OSError if it cannot be read."""
        path, data = Path(self.path) / name, None
        if is_remote(self.path):
            size, data = self._sizes.get(name, 0), remote_data(f"{self.path}/{name}")
        else:
            size = path.stat().st_size
        if large := too_many_bytes(size, most):
            raise ValueError(f"it {large}")
        return path.read_bytes() if data is None else data

    def file(self, name: str) -> str:
        """Return the path of a file; raise ValueError if it leads out of the folder."""
        return f"{self.path}/{inside(name)}" if is_remote(self.path) else str(placed(Path(self.path), name))


def is_saved(folder: Folder) -> bool:
    """Return whether a folder was written by ``save_to_disk`` of datasets, as one dataset or with splits."""
    return folder.has(_STATE) or folder.has(_SPLITS)


def folder_files(folder: Folder, split: str, where: str) -> list[str]:
    """Return the files of rows in a folder; images where each is a row.

    Args:
        split: the split to read, where there are several.
        where: the setting that names the folder, for errors.
    """
    if is_saved(folder):
        return _saved(folder, split, where)
    names = folder.names
    if lists := next(([name] for name in LISTS if name in names), None) or split_files(
        [name for name in names if name.rpartition("/")[2] in LISTS], "", split
    ):
        return [folder.file(name) for name in lists]
    images = [name for name in names if name.lower().endswith(MEDIA)]
    present = {*names}
    if not any(f"{name.rpartition('.')[0]}{ending}" in present for name in images for ending in CAPTIONS):
        # Tables may name images next to them.
        card = folder.data("README.md").decode("utf-8", "replace") if folder.has("README.md") else ""
        if tables := split_files(names, card, split):
            return [folder.file(name) for name in tables]
    if not images:
        raise DataError(
            f"the folder '{folder.path}' has neither {LISTS[0]}, images, nor files of rows of the split '{split}' "
            f"({', '.join((*LINES, *OTHERS))}). Name another folder, or a file."
        )
    return [f"{folder.path}/{name}" for name in images]


def split_files(names: Sequence[str], card: str, split: str) -> list[str]:
    """Return the tables of a split: those that the README.md of a dataset names, or whose names say it; of the split
    train also those whose names say nothing.

    Args:
        names: files of a folder.
        card: the README.md, or ''.
    """
    tables = [name for name in names if ending_of(name) not in ("", ".txt") and name not in _ABOUT]
    if patterns := _patterns(card, split):
        return [name for name in tables if any(fnmatch.fnmatch(name, each) for each in patterns)]
    words = {name: {*re.split(r"[/._-]", name.lower())} for name in tables}
    if said := [name for name in tables if split.lower() in words[name]]:
        return said
    return [name for name in tables if not words[name] & _NAMES] if split == "train" else []


def _patterns(card: str, split: str) -> list[str]:
    """Return the patterns of files that the first or default config in the head of a README.md names for a split."""
    head = re.match(r"---\r?\n(.*?)\n---", card, re.DOTALL)
    try:
        settings = yaml.safe_load(head[1]) if head else None
        configs = settings["configs"] if isinstance(settings, dict) else []
        config = next((each for each in configs if each.get("default")), configs[0])["data_files"]
        entries = config if isinstance(config, list) else [config]
        named = [each if isinstance(each, dict) else {"path": each} for each in entries]
        paths = [each["path"] for each in named if each.get("split", split) == split]
    except (yaml.YAMLError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return []
    return [str(each) for path in paths for each in (path if isinstance(path, list) else [path])]


def _saved(folder: Folder, split: str, where: str) -> list[str]:
    if folder.has(_SPLITS):
        folder = _split_folder(folder, split, where)
    state, place = _read(folder, _STATE, where), f"{folder.path}/{_STATE}"
    if state.get("_indices_data_files"):
        raise DataError(
            f"{where}: '{folder.path}' was saved with indices by an early version of datasets. Load it with "
            "datasets.load_from_disk() and save it with save_to_disk() again."
        )
    try:
        files = {name: folder.file(part(name)) for name in (each["filename"] for each in state["_data_files"])}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where}: '{place}' names no data files: {error}. {SAVE_AGAIN}") from None
    for name, file in files.items():
        if not folder.has(name):
            raise DataError(f"{where}: '{file}' does not exist, but '{_STATE}' next to it names it. {SAVE_AGAIN}")
    return list(files.values())


def _split_folder(folder: Folder, split: str, where: str) -> Folder:
    listed = _read(folder, _SPLITS, where).get("splits")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if split not in names:
        section, of_run, _ = where.partition(".")
        remedy = f"Set {section}.split, or name" if of_run else "Name"
        raise DataError(
            f"{where}: '{folder.path}' has no split '{split}'; it has {', '.join(names) or 'none'}. {remedy} "
            f"the folder of a split, as '{folder.path}/{names[0] if names else 'train'}'."
        )
    try:
        return Folder(folder.file(part(split)))
    except ValueError as error:
        raise DataError(f"{where}: '{folder.path}': {error}. {SAVE_AGAIN}") from None


def _read(folder: Folder, name: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a file; raise DataError if it is missing, too large or malformed."""
    place = f"{where}: '{folder.path}/{name}'"
    try:
        content = json.loads(folder.data(name))
    except (OSError, RecursionError) as error:
        raise DataError(f"{place} cannot be read: {error}. {SAVE_AGAIN}") from None
    except ValueError as error:
        large = f"holds no JSON object of up to {_MOST_BYTES} bytes"
        text = large if "bytes, more than" in str(error) else f"cannot be read: {error}"
        raise DataError(f"{place} {text}. {SAVE_AGAIN}") from None
    if not isinstance(content, dict):
        raise DataError(f"{place} holds no JSON object. {SAVE_AGAIN}")
    return content
