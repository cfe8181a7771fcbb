"""Where models come from: the base model's folder, and the weights of policy artifacts."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.folders import files_below
from configs.model import ModelSection
from configs.path_types import looks_local
from models.weights.lora_files import adapter_files
from storage.file_hash_cache import file_hashes
from storage.layout import PARTS, ArtifactRef

if TYPE_CHECKING:
    from storage.commit import ArtifactStore

PIPELINE = "pipeline"
OPTIMIZER = "optimizer.safetensors"
CRITIC = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
ABOUT_POLICY = "policy.json"


class Weights(Enum):
    """Which weights of a policy artifact; those it does not have fall back to the trained ones."""

    TRAINED = "policy.safetensors"
    """As the last update left them."""
    AVERAGE = "ema.safetensors"
    """Their moving average, for evaluation and export."""
    BEHAVIOR = "behavior.safetensors"
    """The policy that rolls out, where the algorithm lets it follow slowly."""


#: Kind of the artifacts that hold images of the samples of another.
_DRAWN = "renders"
_MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")


def local_model(path: str, revision: str | None, *, without: frozenset[str] = frozenset()) -> Path:
    """Return the local folder of a diffusers model, downloading a hub repository if needed.

    Args:
        path: a folder or a hub id.
        revision: of a hub id.
        without: components whose weights are not downloaded.

    Raises:
        ConfigError: there is neither such a folder nor such a repository.
    """
    if Path(path).is_dir():
        return Path(path)
    if looks_local(path):
        raise ConfigError(f"model.path '{path}' is no folder, and no hub id like 'owner/name' either.")
    from tasks.inputs.hub import download

    return download(path, revision, without=without)


def source_folder(section: ModelSection, commit: str | None = None) -> Path:
    """Return the local folder that a model comes from; weights that a single file holds need not be there.

    Args:
        section: what the config says of it.
        commit: of a hub id, where that is known.

    Raises:
        ConfigError: there is none.
    """
    assert section.path is not None
    return local_model(section.path, commit or section.revision, without=held_in_files(section))


def held_in_files(section: ModelSection) -> frozenset[str]:
    """Return the components of a hub id that single files hold instead; none of a folder, which is here as it is."""
    if not section.single_files or Path(str(section.path)).is_dir():
        return frozenset()
    from configs.registry import resolve
    from models.policies import POLICIES

    family = resolve(POLICIES, section.policy, label="model.policy")
    return family.check_single_files(section.single_files, None)  # type: ignore[no-any-return]


def single_file_identity(section: ModelSection) -> dict[str, str]:
    """Return what makes single files these ones: the checksum of each, by the component it is for.

    Raises:
        ConfigError: there is none.
    """
    found = {}
    for component, said in section.single_files.items():
        file = Path(said).expanduser()
        if not file.is_file():
            raise ConfigError(f"model.single_file: there is no file '{said}'. Paths are relative to the config file.")
        found[component or "file"] = file_hashes(file.parent, [file.name])[file.name]
    return found


def critic_folder(path: str) -> Path:
    """Return the folder of the model a critic begins as.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"critic.path '{path}' is no folder, so there is nothing to begin as. Write a model there with "
            "model.save_pretrained() and tokenizer.save_pretrained(), or remove it: a critic then begins as the base "
            "model."
        )
    return folder


def model_identity(path: str, revision: str | None, *, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return what makes a base model this one: its hub commit, or a checksum of every file of a local folder.

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
    """Return whether a local folder that is called as a snapshot of the hub's cache has other files than the cache."""
    blobs = snapshot.parent.parent / "blobs"
    return any((snapshot / name).resolve().parent != blobs.resolve() for name in model_files(snapshot))


def checkpoint_identity(folder: Path) -> dict[str, str]:
    """Return what makes a checkpoint of ``torch.distributed.checkpoint`` this one: a checksum of every file of it.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"model.checkpoint: there is no folder '{folder}'. Name one that dcp.save() wrote.")
    return file_hashes(folder, sorted(file.name for file in folder.iterdir() if file.is_file()))


def adapter_identity(path: Path) -> dict[str, str]:
    """Return what makes adapters these ones: a checksum of every file that is read of them.

    Raises:
        ConfigError: there are none.
    """
    files = adapter_files(path)
    folder = files[0].parent
    return file_hashes(folder, sorted(file.relative_to(folder).as_posix() for file in files))


def changed_files(section: ModelSection) -> list[str] | None:
    """Read a local model again; return its files that changed unnoticed, None for models that are not local files."""
    local = [] if section.path is None or not Path(section.path).is_dir() else [Path(section.path)]
    looked = [(folder, model_files(folder)) for folder in local]
    looked += [(file.parent, [file.name]) for file in map(Path, section.single_files.values())]
    changed: list[str] = []
    for folder, names in looked:
        believed, found = (file_hashes(folder, names, deep=deep) for deep in (False, True))
        changed += [name for name in found if found[name] != believed[name]]
    return changed if looked else None


def model_files(folder: Path) -> list[str]:
    """Return the files that a model is loaded from, by their paths below its folder, sorted."""
    return [name for name in files_below(folder) if PurePath(name).suffix in _MODEL_SUFFIXES]


def weight_files(store: ArtifactStore, ref: ArtifactRef, weights: Weights) -> list[Path] | None:
    """Return the files of a policy's weights, see ``tensor_files``; None for the base model itself.

    Raises:
        NotCommittedError: the policy is not complete.
        CorruptError: its files are damaged.
    """
    chosen = chosen_weights(store, ref, weights)
    return None if chosen is None else tensor_files(policy_folder(store, ref), chosen.value)


def tensor_files(folder: Path, name: str) -> list[Path]:
    """Return the file of whole tensors, or of each rank the one with its parts; empty where there is neither."""
    return [folder / name] if (folder / name).exists() else sorted(folder.glob(f"{PARTS}/*/{name}"))


def chosen_weights(store: ArtifactStore, ref: ArtifactRef, weights: Weights) -> Weights | None:
    """Return which weights of a policy stand for those asked for; None for the base model itself.

    Raises:
        NotCommittedError: the policy is not complete.
    """
    store.require(ref)
    names = {file.name.rpartition("/")[2] for file in store.shards(ref)[0].files}
    return next((each for each in (weights, Weights.TRAINED) if each.value in names), None)


def critic_files(store: ArtifactStore, ref: ArtifactRef) -> list[Path] | None:
    """Return the files of the critic that was trained beside a policy, see ``tensor_files``; None: none was yet.

    Raises:
        NotCommittedError: the policy is not complete.
        CorruptError: its files are damaged.
    """
    store.require(ref)
    names = {file.name.rpartition("/")[2] for file in store.shards(ref)[0].files}
    return tensor_files(policy_folder(store, ref), CRITIC) if CRITIC in names else None


def policy_folder(store: ArtifactStore, ref: ArtifactRef) -> Path:
    """Return the verified local folder of a complete policy."""
    store.require(ref)
    return store.folder(ref, store.shards(ref)[0])


def exported_folder(store: ArtifactStore, ref: ArtifactRef) -> Path:
    """Return the verified local folder of a complete export.

    Raises:
        NotCommittedError: it is not complete.
    """
    store.require(ref)
    return store.folder(ref, store.shards(ref)[0]) / PIPELINE


def origin_of(store: ArtifactStore, scored: ArtifactRef) -> ArtifactRef:
    """Return the samples that something scored is of: itself, or the texts that were drawn.

    Raises:
        NotCommittedError: it is not complete.
    """
    return ArtifactRef.parse(store.require(scored).inputs[0]) if scored.kind == _DRAWN else scored
