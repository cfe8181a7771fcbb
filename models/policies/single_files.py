"""Pipeline folders made from single files: these are converted; configs and all other files come from a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.folders import files_below
from models.library_loading import read_json
from models.policies.pipeline_index import in_folder, index_file, portable_index
from models.weights.single_file import HeldPart, check_part, unfit, write_part
from models.weights.stored_weights import weight_files

#: Suffixes of component files to copy: no pickles and no notes.
_READ = (".json", ".safetensors", ".txt", ".model", ".jinja")


def check_parts(
    parts: Mapping[str, HeldPart], folder: Path, index: Mapping[str, Any], denoisers: Sequence[str]
) -> None:
    """Check that files hold components of a folder's pipeline, and that the folder has all others; raise ConfigError if
    the files hold another model, or a component is in neither."""
    trained = [name for name in denoisers if _listed(index, name)]
    held = [part for name, part in parts.items() if name in trained]
    if len(trained) > 1 and any(part.whole for part in held):
        both = ", ".join(f"{name}: FILE" for name in trained)
        raise unfit(
            held[0].file,
            f"holds one denoiser, and model.path has {' and '.join(trained)}",
            f"Say which one: model.single_file={{{both}}}",
        )
    # A mismatch of a denoiser is the most helpful message, so denoisers are checked first.
    for name, part in sorted(parts.items(), key=lambda item: item[0] not in denoisers):
        if not _listed(index, name):
            raise unfit(
                part.file, f"holds {name}, which model.path '{folder}' does not have", "Give a file of this model"
            )
        check_part(part, folder, index[name])
    for name in index:
        if name not in parts and _listed(index, name) and (folder / name / "config.json").is_file():
            _check_weights(folder, name, parts)


def _check_weights(folder: Path, name: str, parts: Mapping[str, HeldPart]) -> None:
    try:
        weight_files(folder / name)
    except ConfigError:
        raise ConfigError(
            f"model.path '{folder}' has no weights of {name} as safetensors, and model.single_file holds only "
            f"{', '.join(parts)}. Give a folder or hub id with them, or one file for each: "
            "model.single_file={COMPONENT: FILE}."
        ) from None


def write_folder(parts: Mapping[str, HeldPart], folder: Path, index: Mapping[str, Any], target: Path) -> None:
    """Write a pipeline folder: components from files, all other files from another folder. The other folder's card and
    licenses are not copied: they describe other weights. Raises ConfigError if the files hold another model.
    ``target``: folder to write; must not exist."""
    target.mkdir(parents=True)
    path = index_file(folder)
    written = json.dumps(portable_index(read_json(path), in_folder(folder)), indent=2, sort_keys=True)
    (target / path.name).write_text(f"{written}\n")
    for name in index:
        if name in parts:
            write_part(parts[name], folder, index[name], target / name)
        elif _listed(index, name) and (folder / name).is_dir():
            _copy(folder / name, target / name)


def _copy(source: Path, target: Path) -> None:
    for name in files_below(source):
        if (source / name).suffix in _READ:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def _listed(index: Mapping[str, Any], name: str) -> bool:
    entry = index.get(name)
    return isinstance(entry, list) and entry[0] is not None
