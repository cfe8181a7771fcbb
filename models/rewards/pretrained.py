"""Loads reward models of transformers and diffusers from folders or the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flowmill.configs.errors import ConfigError
from flowmill.configs.path_types import ModelPlace
from flowmill.configs.user_directories import user_path
from flowmill.models.devices import chosen_device, local_rank
from flowmill.models.library_loading import quiet_transformers
from flowmill.models.rewards.sizes import Takes, transformer_takes
from flowmill.models.weights import pretrained_loading

_REMEDY = (
    "Give the id of a repository that can be reached and has safetensors weights, or a local folder of one "
    "('hf download ID')."
)


@dataclass(kw_only=True)
class Pretrained:
    """Base class of rewards with a model of transformers."""

    name: ClassVar[str]

    model: ModelPlace
    """Folder, or id on the hub, of the model."""
    revision: str | None = None
    """Commit, tag or branch of the model on the hub."""
    device: str = "auto"
    """Torch device, or auto."""

    def chosen(self) -> Any:
        """Return the torch device of this process."""
        return chosen_device(self.device, local_rank(), label=f"device of reward '{self.name}'")

    def loaded(self, kind: str) -> Any:
        """Return the model, or a part of it, as a class of transformers loads it."""
        return load_pretrained(kind, self.model, self.revision, reward=self.name)

    @classmethod
    def takes(cls, options: Mapping[str, Any]) -> Takes | None:
        """Return the memory the model needs on a device, without a head; None if it is unknown yet."""
        model, dtype = (options.get(name, getattr(cls, name, "")) for name in ("model", "dtype"))
        return transformer_takes(str(model), str(dtype or "float32"))


def load_pretrained(kind: str, path: str, revision: str | None, *, reward: str) -> Any:
    """Return a model or processor of transformers from a folder or hub repository; weights from safetensors only.
    Raises ConfigError if it does not exist, cannot be reached, lacks weights, or has no safetensors."""
    import transformers

    quiet_transformers()
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
    folder = user_path(path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    # Pipelines read the files in subfolders; the top level may also hold the same weights in one file.
    patterns = ["model_index.json", *(f"*/*.{kind}" for kind in ("json", "safetensors", "txt", "model"))]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns, ignore_patterns=["*.fp16*"]))
    except (OSError, ValueError, HFValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"reward '{reward}': '{path}' cannot be loaded: {reason} {_REMEDY}") from None
