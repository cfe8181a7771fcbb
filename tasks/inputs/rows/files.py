"""The files of rows that a source names: by path, pattern, range or list, in a folder, or of a dataset of the hub."""

from __future__ import annotations

import contextlib
import glob
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowmill.configs.errors import DataError, first_line
from flowmill.configs.folders import files_below
from flowmill.tasks.inputs.rows.folder import CAPTIONS, Folder, folder_files, is_saved, split_files
from flowmill.tasks.inputs.rows.remote import is_remote, remote_matches
from flowmill.tasks.inputs.rows.row import LINES, MEDIA, OTHERS, ending_of

#: A range of numbers in the name of files, and the mark between names, as WebDataset writes them.
_BRACES, _AND = re.compile(r"\{(\d+)\.\.(\d+)\}"), "::"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
#: Seconds in which the hub has to answer.
_ANSWER_S = 10.0
_READ = ", ".join((*LINES, *OTHERS))
_NEITHER = f"is neither a file of rows ({_READ}, also with .gz), nor a folder, nor a dataset id like 'owner/name'"

#: Files with time of change and size.
Stamps = tuple[tuple[str, int, int], ...]


def row_files(source: str, split: str, where: str) -> list[str]:
    """Return the files of rows that a source names, in order; images where each is a row.

    Args:
        source: a file, a folder, the id of a dataset, ranges ({000..015}), patterns (*, ?, [...]), or several with ::.
        split: the split to read, where there are several.
        where: the setting that names the source, for errors.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    return [file for part in _named(source) for file in _files(part, split, where)]


def local_files(source: str) -> list[Path]:
    """Return the existing files on this machine that a source names, or that mark a folder; none for a dataset id."""
    files: list[Path] = []
    for name in _named(source):
        path = Path(name)
        if path.is_dir():
            saved = is_saved(Folder(name))
            names = ("state.json", "dataset_dict.json") if saved else files_below(path)
            files += [path / each for each in names if (path / each).is_file()]
        elif not is_remote(name):
            files += [Path(each) for each in _matching(name) if Path(each).is_file()]
    return files


def stamps_of(source: str) -> Stamps:
    """Return path, time of change and size of the files that ``local_files`` returns."""
    stats = ((path, path.stat()) for path in local_files(source))
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats)


def is_there(source: str) -> bool:
    """Return whether a source can be read here; a dataset id, or a file on S3, always counts as there."""
    return all(is_remote(name) or _is_id(name) or bool(local_files(name)) for name in _named(source))


def _named(source: str) -> list[str]:
    """Return the names in a list with ::, with each number of their ranges."""
    if Path(source).exists():
        return [source]
    return [each for part in source.split(_AND) for each in _expanded(part)]


def _expanded(name: str) -> list[str]:
    match = _BRACES.search(name)
    if match is None:
        return [name]
    first, last = match.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [each for number in numbers for each in _expanded(name[: match.start()] + number + name[match.end() :])]


def _matching(name: str) -> list[str]:
    """Return the sorted files that match a pattern; a name itself."""
    if not glob.has_magic(name) or Path(name).exists():
        return [name]
    return remote_matches(name) if is_remote(name) else sorted(glob.glob(name))


def _is_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not ending_of(name) and not Path(name).exists()


def _files(name: str, split: str, where: str) -> list[str]:
    path = Path(name)
    if _is_id(name) and not (Path(name).suffix and "/" not in name):
        return folder_files(Folder(_downloaded(name, split, where)), split, where)
    if not is_remote(name) and path.is_dir():
        return folder_files(Folder(name), split, where)
    files = _matching(name)
    if not files:
        raise DataError(f"no file matches '{name}'. Paths are relative to the config file.")
    if lost := next((each for each in files if not (is_remote(each) or Path(each).is_file())), None):
        absent = "does not exist. Paths are relative to the config file" if ending_of(lost) else _NEITHER
        raise DataError(f"'{lost}' {'is no regular file' if Path(lost).exists() else absent}.")
    if is_remote(name) and not ending_of(name) and not glob.has_magic(name):
        return folder_files(Folder(name), split, where)
    if wrong := next((each for each in files if not ending_of(each)), None):
        raise DataError(f"'{wrong}' {_NEITHER}.")
    return files


@lru_cache(maxsize=8)
def _downloaded(source: str, split: str, where: str) -> str:
    """Return the folder of a dataset of the hub, downloaded by its client, or as that holds it if the hub is not asked;
    of the tables only those of the split."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    dataset: Any = None
    try:
        # The client itself would ask a hub that does not answer for many minutes.
        with contextlib.suppress(OfflineModeIsEnabled):
            dataset = HfApi().dataset_info(source, timeout=_ANSWER_S)
        if dataset is None:
            return str(snapshot_download(source, repo_type="dataset", local_files_only=True))
        names, card = [each.rfilename for each in dataset.siblings or ()], ""
        if "README.md" in names:
            place = hf_hub_download(source, "README.md", repo_type="dataset", revision=dataset.sha)
            card = Path(place).read_text("utf-8", "replace")
        tables = [name for name in names if ending_of(name) not in ("", ".txt")]
        others = [name for name in names if name.lower().endswith((*MEDIA, *CAPTIONS, "readme.md"))]
        patterns = list(map(glob.escape, [*(split_files(tables, card, split) or tables), *others]))
        return str(snapshot_download(source, repo_type="dataset", revision=dataset.sha, allow_patterns=patterns))
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where}: dataset '{source}' (split '{split}') cannot be loaded: {first_line(error)}. Use a dataset id "
            f"that can be reached, or a file that exists ({_READ}). With HF_HUB_OFFLINE=1 the hub is not asked, and a "
            "downloaded copy is used."
        ) from None
