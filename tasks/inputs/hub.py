"""Selects the files of a hub repository that a pipeline or language model loads: those ``from_pretrained`` reads, never
a pickle."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.models.library_loading import read_json
from flowmill.models.policies.pipeline_index import CLASSIC, INDICES, plain_index

#: Weights that are not safetensors: pickles, and those of other libraries.
_OTHER_WEIGHTS = (
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".msgpack",
    ".h5",
    ".onnx",
    ".onnx_data",
    ".pb",
    ".gguf",
    ".ot",
)
#: Top-level files: the pipeline's index, the model card and the license.
_TOP = (*INDICES, "README.md", "LICENSE*", "LICENCE*", "NOTICE*")
#: Files of a model of transformers, which has no index of components: all are at the top.
_MODEL_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_MODEL_TEXTS = (".json", ".txt", ".model", ".jinja")
_SHARDED = re.compile(r"-\d{5}-of-\d{5}$")


def download(repo: str, revision: str | None, *, without: frozenset[str] = frozenset()) -> Path:
    """Return the local snapshot of a hub repository's pipeline, or of its model of transformers; files in the cache are
    not downloaded again.

    A branch is resolved to its commit first, so that all files come from one commit.

    Args:
        repo: the repository's id.
        revision: branch, tag or commit.
        without: components whose weights are not downloaded.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision)
    except (RepositoryNotFoundError, HfHubHTTPError, ValueError) as error:
        raise _failed(repo, error) from None
    except (OfflineModeIsEnabled, HTTPError, OSError) as error:
        return _cached(repo, revision, error)
    try:
        names = [sibling.rfilename for sibling in info.siblings or ()]
        where = f"model.path '{repo}'"
        listed = next((name for name in INDICES if name in names), CLASSIC)
        if listed not in names and "config.json" in names:
            patterns = transformers_files(names, where=where)
        else:
            path = huggingface_hub.hf_hub_download(repo, listed, revision=info.sha)
            patterns = pipeline_files(names, read_json(Path(path)), where=where, without=without)
        return Path(huggingface_hub.snapshot_download(repo, revision=info.sha, allow_patterns=patterns))
    except (HTTPError, OSError, ValueError) as error:
        raise _failed(repo, error) from None


def pipeline_files(
    names: Sequence[str], index: Mapping[str, Any], *, where: str, without: frozenset[str] = frozenset()
) -> list[str]:
    """Return the files of a repository that its pipeline loads.

    For every component in the index, these are all files except weights in other formats, and variants such as fp16
    where the plain weights exist.

    Args:
        names: the repository's files.
        index: the parsed index file.
        where: the setting, for errors.
        without: components whose weights are not downloaded.
    """
    plain = plain_index(index, lambda component: any(name.startswith(f"{component}/") for name in names))
    folders = [name for name, value in plain.items() if isinstance(value, list) and value[0] is not None]
    files = [name for name in names if _is_stated(name)]
    for folder in folders:
        inside = [name for name in names if name.startswith(f"{folder}/")]
        if folder in without:
            files += [name for name in inside if not name.endswith((".safetensors", *_OTHER_WEIGHTS, ".index.json"))]
            continue
        weights = [name for name in inside if name.endswith(".safetensors")]
        other = [name for name in inside if name.endswith(_OTHER_WEIGHTS)]
        if other and not weights:
            raise ConfigError(
                f"{where}: '{folder}' has weights as {PurePosixPath(other[0]).name} only, which is not safetensors. "
                "Pickled weights can run any code when they are loaded, so flowmill never does. Take a revision with "
                "safetensors, or convert it: DiffusionPipeline.from_pretrained(...).save_pretrained(FOLDER)."
            )
        variants = _variants(weights)
        # An index of a variant or of another format would point to weights that are left out.
        indices = [f"{name}.index.json" for name in other] + [name for name in inside if _is_odd_index(name)]
        files += [name for name in inside if name not in {*other, *variants, *indices}]
    return files


def transformers_files(names: Sequence[str], *, where: str) -> list[str]:
    """Return the files of a repository that its model of transformers loads: settings, tokenizer and weights under the
    names of ``save_pretrained``, without copies in other formats, and license and card.

    Args:
        names: the repository's files.
        where: the setting, for errors.
    """
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if _MODEL_WEIGHTS.fullmatch(name)]
    other = [name for name in top if name.endswith(_OTHER_WEIGHTS)]
    if not weights:
        raise ConfigError(
            f"{where}: there is no model.safetensors, {f'but {other[0]}' if other else 'nor other weights'}. Pickled "
            "weights can run any code when they are loaded, so flowmill never does. Take a revision with safetensors, "
            "or convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)."
        )
    texts = [name for name in top if name.endswith(_MODEL_TEXTS) and not name.endswith(".index.json")]
    return [*weights, *texts, *(name for name in top if name not in texts and _is_stated(name))]


def _is_stated(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _TOP)


def _variants(weights: Sequence[str]) -> list[str]:
    """Return weights of a variant, such as ``model.fp16.safetensors``, where the plain ones exist too."""
    variants = []
    for name in weights:
        path = PurePosixPath(name)
        stem = _SHARDED.sub("", path.stem)
        plain, _, variant = stem.partition(".")
        siblings = (PurePosixPath(other) for other in weights)
        is_plain = any(_SHARDED.sub("", other.stem) == plain and other.parent == path.parent for other in siblings)
        if variant and is_plain:
            variants.append(name)
    return variants


def _is_odd_index(name: str) -> bool:
    """Return whether a file indexes weights other than plain safetensors, such as ``x.safetensors.index.fp16.json``."""
    return ".index." in name and not re.fullmatch(r"[^.]+\.safetensors\.index\.json", PurePosixPath(name).name)


def _cached(repo: str, revision: str | None, error: Exception) -> Path:
    """Return the cached snapshot of a repository that cannot be reached."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        raise _failed(repo, error) from None


def _failed(repo: str, error: Exception) -> ConfigError:

    return ConfigError(
        f"model.path '{repo}' cannot be downloaded: {type(error).__name__}: {str(error).splitlines()[0]}. Check "
        "the id, log in with 'hf auth login' if the repository is gated, or give a local folder."
    )
