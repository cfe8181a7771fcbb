"""Locations of models: the folder of the base model, and the weights of policy artifacts."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.folders import files_below
from flowmill.configs.model import ModelSection
from flowmill.configs.path_types import looks_local
from flowmill.configs.user_directories import user_path
from flowmill.models.weights.lora_files import adapter_files
from flowmill.storage.backends.file_hash_cache import file_hashes
from flowmill.storage.layout import PARTS, ArtifactRef

if TYPE_CHECKING:
    from flowmill.storage.artifacts.commit import ArtifactStore

PIPELINE = "pipeline"
OPTIMIZER = "optimizer.safetensors"
CRITIC = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
POLICY_FILE = "policy.json"


class Weights(Enum):
    """The weights of a policy artifact; absent ones fall back to the trained weights."""

    TRAINED = "policy.safetensors"
    """The weights after the last update."""
    AVERAGE = "ema.safetensors"
    """Their moving average, for evaluation and export."""
    BEHAVIOR = "behavior.safetensors"
    """The policy of rollouts, if the algorithm lets it lag behind the trained one."""


#: Kind of artifacts with images drawn of the samples of another artifact.
_DRAWN = "renders"
_MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")


def local_model(path: str, revision: str | None, *, without: frozenset[str] = frozenset()) -> Path:
    """Return the local folder of a model, downloading a hub repository if needed.

    Args:
        path: a folder or a hub id.
        revision: of a hub id.
        without: components whose weights are not downloaded.
    """
    if Path(path).is_dir():
        return Path(path)
    if looks_local(path):
        raise ConfigError(f"model.path '{path}' is no folder, and no hub id like 'owner/name' either.")
    from flowmill.tasks.inputs.hub import download

    return download(path, revision, without=without)


def source_folder(section: ModelSection, commit: str | None = None) -> Path:
    """Return the local folder of a model; components that single files replace may lack weights there.

    Args:
        section: the config section of the model.
        commit: of a hub id; None: that of the revision.
    """
    assert section.path is not None
    return local_model(section.path, commit or section.revision, without=components_in_files(section))


def components_in_files(section: ModelSection) -> frozenset[str]:
    """Return the components of a hub id that single files replace; empty for a local folder."""
    if not section.single_files or Path(str(section.path)).is_dir():
        return frozenset()
    from flowmill.configs.registry import resolve
    from flowmill.models.policies import POLICIES

    family = resolve(POLICIES, section.policy, label="model.policy")
    return family.check_single_files(section.single_files, None)  # type: ignore[no-any-return]


def single_file_identity(section: ModelSection) -> dict[str, str]:
    """Return the identity of single files: the checksum of each by component."""
    identity = {}
    for component, path in section.single_files.items():
        file = user_path(path)
        if not file.is_file():
            raise ConfigError(f"model.single_file: there is no file '{path}'. Paths are relative to the config file.")
        identity[component or "file"] = file_hashes(file.parent, [file.name])[file.name]
    return identity


def critic_folder(path: str) -> Path:
    """Return the folder of the model a critic starts from; raise ConfigError if it does not exist."""
    folder = user_path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"critic.path '{path}' is no folder, so there is nothing to begin as. Write a model there with "
            "model.save_pretrained() and tokenizer.save_pretrained(), or remove it: a critic then begins as the base "
            "model."
        )
    return folder


def model_identity(path: str, revision: str | None, *, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the identity of a base model: its hub commit, or the checksum of every file of a local folder.

    Args:
        path: a folder or a hub id.
        revision: of a hub id.
        without: components of a hub id whose weights are not downloaded.
    """
    folder = local_model(path, revision, without=without)
    commit, local = re.search(r"/snapshots/([0-9a-f]{40})$", folder.as_posix()), Path(path).is_dir()
    if commit and not (local and _is_changed(folder)):
        return {"hub": path, "commit": commit[1]}
    return {"files": file_hashes(folder, model_files(folder))}


def _is_changed(snapshot: Path) -> bool:
    """Return whether a local folder that looks like a snapshot of the hub's cache has files from outside the cache."""
    blobs = snapshot.parent.parent / "blobs"
    return any((snapshot / name).resolve().parent != blobs.resolve() for name in model_files(snapshot))


def adapter_identity(path: Path) -> dict[str, str]:
    """Return the identity of adapters: the checksum of every file that is read."""
    files = adapter_files(path)
    folder = files[0].parent
    return file_hashes(folder, sorted(file.relative_to(folder).as_posix() for file in files))


def changed_files(section: ModelSection) -> list[str] | None:
    """Read a local model again; return its files that changed undetected, None for models without local files."""
    local = [] if section.path is None or not Path(section.path).is_dir() else [Path(section.path)]
    looked = [(folder, model_files(folder)) for folder in local]
    looked += [(file.parent, [file.name]) for file in map(Path, section.single_files.values())]
    changed: list[str] = []
    for folder, names in looked:
        believed, hashes = (file_hashes(folder, names, deep=deep) for deep in (False, True))
        changed += [name for name in hashes if hashes[name] != believed[name]]
    return changed if looked else None


def model_files(folder: Path) -> list[str]:
    """Return the files that loading a model reads, by their paths below its folder, sorted."""
    return [name for name in files_below(folder) if PurePath(name).suffix in _MODEL_SUFFIXES]


def weight_files(store: ArtifactStore, ref: ArtifactRef, weights: Weights) -> list[Path] | None:
    """Return the files of a policy's weights, see ``tensor_files``; None for the base model itself."""
    chosen = chosen_weights(store, ref, weights)
    return None if chosen is None else tensor_files(policy_folder(store, ref), chosen.value)


def tensor_files(folder: Path, name: str) -> list[Path]:
    """Return the file of whole tensors, or the files with the parts of each rank; empty if there is neither."""
    return [folder / name] if (folder / name).exists() else sorted(folder.glob(f"{PARTS}/*/{name}"))


def chosen_weights(store: ArtifactStore, ref: ArtifactRef, weights: Weights) -> Weights | None:
    """Return the weights to use for the requested ones of a policy; None for the base model itself."""
    names = _stored_names(store, ref)
    return next((each for each in (weights, Weights.TRAINED) if each.value in names), None)


def _stored_names(store: ArtifactStore, ref: ArtifactRef) -> set[str]:
    store.require(ref)
    return {file.name.rpartition("/")[2] for file in store.shards(ref)[0].files}


def critic_files(store: ArtifactStore, ref: ArtifactRef) -> list[Path] | None:
    """Return the files of the critic trained with a policy, see ``tensor_files``; None if there is none yet."""
    return tensor_files(policy_folder(store, ref), CRITIC) if CRITIC in _stored_names(store, ref) else None


def policy_folder(store: ArtifactStore, ref: ArtifactRef) -> Path:
    """Return the verified local folder of a complete policy."""
    store.require(ref)
    return store.folder(ref, store.shards(ref)[0])


def exported_folder(store: ArtifactStore, ref: ArtifactRef) -> Path:
    """Return the verified local folder of the model in a complete export, or in a base model that was written."""
    return policy_folder(store, ref) / PIPELINE


def origin_of(store: ArtifactStore, scored: ArtifactRef) -> ArtifactRef:
    """Return the samples behind a scored artifact: the artifact itself, or the texts that its images show."""
    return ArtifactRef.parse(store.require(scored).inputs[0]) if scored.kind == _DRAWN else scored
