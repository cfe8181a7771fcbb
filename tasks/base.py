"""The base model as an artifact: built and pre-trained here, or the identity of a folder or hub snapshot."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.fingerprint import canonical_json
from configs.registry import create
from storage.commit import hash_file
from storage.layout import ArtifactRef
from tasks.stage import Output, Shard, Stage
from tasks.workspace import Workspace

PIPELINE = "pipeline"
IDENTITY = "identity.json"


class BaseStage(Stage):
    """Builds the quickstart's model, or records which model the run starts from."""

    name = "base"
    kind = "bases"

    def options(self) -> Mapping[str, Any]:
        """The builder and its options, or the content of the model."""
        section = self.config.model
        if section.path is not None:
            return {"identity": model_identity(section.path, section.revision)}
        return {"build": None if section.build is None else section.build.model_dump(mode="json")}

    def inputs(self) -> tuple[ArtifactRef, ...]:
        """None."""
        return ()

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("model")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Build and pre-train, or write the identity down."""
        self.workspace.use_threads()
        build = self.config.model.build
        if build is None:
            (folder / IDENTITY).write_text(canonical_json(self.options()))
            return Output(rows=1)
        from models.libraries import quiet_libraries
        from models.quickstart import BUILDERS

        quiet_libraries()
        builder = create(BUILDERS, build.name, build.options, what="model.build")
        builder.build(folder / PIPELINE, self._report)
        return Output(rows=1)

    def _report(self, what: str, done: int, total: int) -> None:
        self.workspace.reporter.progress(self.name, 0, done, total, what)


def locate_base(workspace: Workspace) -> Path:
    """Return the local folder of the run's base model.

    Raises:
        ConfigError: the folder does not exist, or the hub repository cannot be had.
    """
    section = workspace.config.model
    if section.path is not None:
        return local_model(section.path, section.revision)
    ref = workspace.run.require(0, "base").ref
    workspace.store.require(ref)
    return workspace.store.folder(ref, workspace.store.records(ref)[0]) / PIPELINE


def local_model(path: str, revision: str | None) -> Path:
    """Return the local folder of a diffusers model, downloading a hub repository if needed.

    Raises:
        ConfigError: there is neither such a folder nor such a repository.
    """
    if Path(path).is_dir():
        return Path(path)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(f"model.path '{path}' is no folder, and no hub id like 'owner/name' either.")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=_PIPELINE_FILES))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path '{path}' cannot be downloaded: {type(error).__name__}: {str(error).splitlines()[0]}. Check "
            "the id, log in with 'hf auth login' if the repository is gated, or give a local folder."
        ) from None


def model_identity(path: str, revision: str | None) -> dict[str, Any]:
    """Return what makes a base model this one: its hub commit, or a checksum of every file of a local folder."""
    folder = local_model(path, revision)
    commit = re.search(r"/snapshots/([0-9a-f]{40})$", folder.as_posix())
    if commit:
        return {"hub": path, "commit": commit[1]}
    files = sorted(
        p for p in folder.rglob("*") if p.is_file() and p.suffix in (".json", ".safetensors", ".txt", ".model")
    )
    return {"files": {file.relative_to(folder).as_posix(): hash_file(file) for file in files}}


def pipeline_class(folder: Path) -> str:
    """Return the pipeline class named by a diffusers folder."""
    return str(json.loads((folder / "model_index.json").read_text())["_class_name"])


_PIPELINE_FILES = ["*.json", "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.model"]
