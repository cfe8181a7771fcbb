"""Whether a model's folder has every weight that its config asks for, from headers alone.

Libraries do not refuse what is not whole: transformers draws missing weights at random, and diffusers leaves them
without memory. Training would then be of another model than the one that is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from configs.errors import ConfigError
from models.library_loading import quiet_libraries, read_json
from models.weights.pretrained_loading import load_pretrained
from models.weights.stored_weights import on_meta, weight_files


def check_complete(folder: Path, made: Any, *, label: str) -> None:
    """Check that a folder has all weights of a model, in the shapes that its config says; nothing is loaded.

    Args:
        folder: of a component, or of a model of transformers.
        made: its class, of diffusers or transformers.
        label: the setting that names it.

    Raises:
        ConfigError: one is missing, or has another shape.
        OSError: a file is missing.
        ValueError: one cannot be read.
    """
    quiet_libraries()
    config = folder / "config.json"
    if not config.is_file() or "quantization_config" in read_json(config):
        # Numbers of few bits are packed, in shapes of their own.
        return
    find = _of_diffusers if hasattr(made, "load_config") else _of_transformers
    try:
        lacking = sorted(find(folder, made, label))
    except SafetensorError as error:
        raise ValueError(f"a file of '{folder}' is no safetensors file ({error})") from None
    if lacking:
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise ConfigError(
            f"{label} '{folder}' {lacking[0]}{more}, which its config.json asks for; training would be of "
            "another model than this. Save it again with save_pretrained(), or copy or download it again."
        )


def _of_diffusers(folder: Path, made: Any, label: str) -> Iterable[str]:
    """Yield what is missing, or has another shape (``ModelMixin.from_pretrained``)."""
    stored: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as opened:
            stored |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    model: Any = on_meta(partial(made.from_config, read_json(folder / "config.json")))
    # Names of attention layers before they had one class.
    model._fix_state_dict_keys_on_load(stored)
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if name not in stored:
            yield f"has no weight '{name}' of shape {shape}"
        elif stored[name] != shape and math.prod(stored[name]) != tensor.numel():
            yield f"has '{name}' of shape {stored[name]} instead of {shape}"


def _of_transformers(folder: Path, made: Any, label: str) -> Iterable[str]:
    """Yield what is missing after the renaming and merging that loading does, which this is without any number."""
    try:
        loading: dict[str, Any] = {"device_map": "meta", "output_loading_info": True, "use_safetensors": True}
        _, about = load_pretrained(made, folder, label=label, **loading)
    except RuntimeError as error:
        said = [line.strip() for line in str(error).splitlines() if "mismatch" in line.lower()] or [str(error)]
        raise ConfigError(
            f"{label} '{folder}' has weights of other sizes than its config.json says: {said[0][:300]}. Copy or "
            "download it again."
        ) from None
    return [f"has no weight '{name}'" for name in about["missing_keys"]]
