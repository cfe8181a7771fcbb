"""Checks from headers alone that a model's folder has every weight that its config requires.

Libraries accept incomplete models: transformers initializes missing weights at random, and diffusers leaves them on the
meta device. A run would then train a different model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flowmill.configs.errors import ConfigError
from flowmill.models.library_loading import quiet_transformers, read_json
from flowmill.models.weights.pretrained_loading import load_pretrained
from flowmill.models.weights.stored_weights import on_meta, weight_files


def check_complete(folder: Path, kind: Any, *, label: str) -> None:
    """Check, without loading weights, that a folder has all weights of a model in the shapes of its config; raise
    ConfigError if a weight is missing or has another shape, OSError if a file is missing, ValueError if a file cannot
    be read."""
    quiet_transformers()
    config = folder / "config.json"
    if not config.is_file() or "quantization_config" in read_json(config):
        # Quantized weights are packed in other shapes.
        return
    files = sorted(_state(file) for file in folder.iterdir() if file.is_file())
    if lacking := lacking_weights(folder, kind, label, tuple(files)):
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise ConfigError(
            f"{label} '{folder}' {lacking[0]}{more}, which its config.json requires; a run would train a different "
            "model. Save it again with save_pretrained(), or copy or download it again."
        )


def _state(file: Path) -> tuple[str, int, int, int, int]:
    state = file.stat()
    return file.name, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


@lru_cache(maxsize=64)
def lacking_weights(folder: Path, kind: Any, label: str, files: tuple[Any, ...]) -> list[str]:
    """Return missing weights and other shapes, as ends of a sentence, computed once for files of one state: a process
    loads parts of a folder several times. Raises ConfigError and OSError as ``check_complete``; ValueError if a file
    cannot be read."""
    find = _of_diffusers if hasattr(kind, "load_config") else _of_transformers
    try:
        return sorted(find(folder, kind, label))
    except SafetensorError as error:
        raise ValueError(f"a file of '{folder}' is no safetensors file ({error})") from None


def _of_diffusers(folder: Path, kind: Any, label: str) -> Iterable[str]:
    """Yield missing weights and other shapes, as ends of a sentence (``ModelMixin.from_pretrained``)."""
    stored: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as opened:
            stored |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    model: Any = on_meta(partial(kind.from_config, read_json(folder / "config.json")))
    # Renames attention layers of older diffusers versions.
    model._fix_state_dict_keys_on_load(stored)
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if name not in stored:
            yield f"has no weight '{name}' of shape {shape}"
        elif stored[name] != shape and math.prod(stored[name]) != tensor.numel():
            yield f"has '{name}' of shape {stored[name]} instead of {shape}"


def _of_transformers(folder: Path, kind: Any, label: str) -> Iterable[str]:
    """Return missing weights, from loading on the meta device, which renames and merges weights as usual."""
    try:
        loading: dict[str, Any] = {"device_map": "meta", "output_loading_info": True, "use_safetensors": True}
        _, report = load_pretrained(kind, folder, label=label, **loading)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if "mismatch" in line.lower()] or [str(error)]
        raise ConfigError(
            f"{label} '{folder}' has weights of other sizes than its config.json says: {lines[0][:300]}. Copy or "
            "download it again."
        ) from None
    return [f"has no weight '{name}'" for name in report["missing_keys"]]
