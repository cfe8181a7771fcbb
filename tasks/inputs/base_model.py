"""The trained model as a model card names it: without local paths, and with the license that its files state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from flowmill.configs.model import ModelSection
from flowmill.storage.backends.checksums import hash_file

#: License files a folder may hold, copied into exports.
LICENSE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*")


@dataclass(frozen=True, slots=True, kw_only=True)
class License:
    """The license that a model's files state."""

    id: str = "unknown"
    """The Hub's name of the license; ``other`` for a license file alone, ``unknown`` for neither."""
    name: str | None = None
    """Name of a license that the Hub does not list."""
    link: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The model that training started from."""

    source: Literal["hub", "folder", "file", "built"]
    """A Hugging Face repository, a local folder, a file of weights in another layout, or built by flowmill."""
    name: str
    """Hub id, name of the folder or file, or of the builder."""
    revision: str | None
    """Commit of the Hub's repository."""
    license: License

    def plain(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"source": self.source, "name": self.name, "revision": self.revision, "license": self.license.id}


def describe_base(section: ModelSection, identity: Mapping[str, Any], folder: Path) -> BaseModel:
    """Return the run's base model.

    Args:
        section: the config section of the model.
        identity: result of ``flowmill.tasks.inputs.weight_sources.model_identity``; not used for a built model.
        folder: the folder with its files.
    """
    if section.build is not None:
        name = str(section.build.options.get("family", section.build.name))
        return BaseModel(source="built", name=name, revision=None, license=License())
    if section.single_files:
        # The license in the folder applies to other weights.
        return BaseModel(source="file", name=section.base_name, revision=None, license=License())
    name, path = str(section.path), Path(str(section.path))
    if "commit" not in identity:
        return BaseModel(source="folder", name=path.resolve().name, revision=None, license=license_of(folder))
    if path.is_dir():
        # A snapshot named by its folder in the Hub's cache: .../models--owner--name/snapshots/commit
        cached = path.resolve().parent.parent.name
        name = cached.removeprefix("models--").replace("--", "/") if cached.startswith("models--") else path.name
    return BaseModel(source="hub", name=name, revision=identity["commit"], license=license_of(folder))


def license_of(folder: Path) -> License:
    """Return the license that a model folder's card or license file states."""
    stated = front_matter(folder / "README.md")
    if isinstance(stated.get("license"), str):
        name, link = stated.get("license_name"), stated.get("license_link")
        return License(
            id=stated["license"], name=None if name is None else str(name), link=None if link is None else str(link)
        )
    files = license_files(folder)
    return License(id="other", name="see-license-file", link=files[0].name) if files else License()


def license_files(folder: Path) -> list[Path]:
    """Return the license files of a model folder, sorted."""
    return sorted(path for pattern in LICENSE_FILES for path in folder.glob(pattern) if path.is_file())


def license_identity(folder: Path) -> dict[str, Any]:
    """Return the facts of a folder that a card shows but the model's identity does not cover."""
    return {**asdict(license_of(folder)), "files": {file.name: hash_file(file) for file in license_files(folder)}}


def front_matter(card: Path) -> Mapping[str, Any]:
    """Return the YAML front matter of a model card; empty if the card has none or it cannot be parsed."""
    if not card.is_file():
        return {}
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, dict) else {}
