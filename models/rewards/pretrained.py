"""Loads reward models of transformers and diffusers from folders or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from models.library_loading import quiet_libraries
from models.weights import pretrained_loading

_REMEDY = (
    "Give the id of a repository that can be reached and has safetensors weights, or a local folder of one "
    "('hf download ID')."
)


def load_pretrained(kind: str, path: str, revision: str | None, *, reward: str) -> Any:
    """Return a model or processor of transformers from a folder or hub repository; weights from safetensors only.
    Raises ConfigError if it does not exist, cannot be reached, lacks weights, or has no safetensors."""
    import transformers

    quiet_libraries()
    label, loader = f"reward '{reward}':", getattr(transformers, kind)
    options: dict[str, Any] = {"revision": revision, "local_files_only": Path(path).is_dir(), "remedy": _REMEDY}
    if kind.endswith(("Processor", "Tokenizer", "Config")):
        return pretrained_loading.load_pretrained(loader, path, label=label, **options)
    options |= {"use_safetensors": True, "output_loading_info": True}
    model, report = pretrained_loading.load_pretrained(loader, path, label=label, **options)
    if report["missing_keys"]:
        # transformers draws missing weights at random, so scores would change from process to process.
        raise ConfigError(
            f"{label} '{path}' has no weight '{min(report['missing_keys'])}' (of {len(report['missing_keys'])}), "
            f"which a {type(model).__name__} needs. Choose a model that was trained as one, or copy it again."
        )
    return model


def downloaded(path: str, revision: str | None, *, reward: str) -> Path:
    """Return the folder of a pipeline of diffusers: a local one, or a copy of a hub repository's. Raises ConfigError if
    it does not exist, or cannot be reached."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    # Pipelines read the files in subfolders; the top level may also hold the same weights in one file.
    wanted = ["model_index.json", *(f"*/*.{kind}" for kind in ("json", "safetensors", "txt", "model"))]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=wanted, ignore_patterns=["*.fp16*"]))
    except (OSError, ValueError, HFValidationError) as error:
        raise _unreachable(path, error, reward) from None


def _unreachable(path: str, error: Exception, reward: str) -> ConfigError:
    return ConfigError(f"reward '{reward}': '{path}' cannot be loaded: {str(error).splitlines()[0]} {_REMEDY}")
