"""LoRA files: writing them for ``load_lora_weights``, byte for byte reproducible, and finding those of other tools."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.user_directories import user_path
from flowmill.models.library_loading import diffusers_class
from flowmill.models.weights.safetensors_header import canonical_header

LORA_FILE = "pytorch_lora_weights.safetensors"
"""File name that ``load_lora_weights`` expects (diffusers' ``LORA_WEIGHT_NAME_SAFE``)."""
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""File names of peft's ``save_pretrained``."""


def adapter_file(path: Path) -> Path:
    """Return the safetensors file of adapters to start from; raise ConfigError if there is no such file, or there are
    several. ``path``: the file, or a folder where it has a usual name or is the only safetensors file."""
    path = user_path(path)
    if path.is_file() and path.suffix == ".safetensors":
        return path
    if path.is_dir():
        by_name = [path / name for name in (PEFT_FILE, LORA_FILE) if (path / name).is_file()]
        files = by_name or sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return files[0]
        reason = f"has {len(files)} safetensors files" if files else "has no safetensors file"
        raise unfit(path, reason, "Give the file itself; pickled ones (.bin, .pt) are not read")
    raise unfit(path, "is no safetensors file and no folder", "Paths are relative to the config file")


def adapter_files(path: str | Path) -> list[Path]:
    """Return the files to read for adapters to start from: the adapter, peft's settings, files of other denoisers.
    Raises ConfigError, see ``adapter_file``."""
    path = user_path(path)
    file = adapter_file(path)
    if file == path:
        others = [file.parent / PEFT_CONFIG] if file.name == PEFT_FILE else []
    else:
        others = [file.parent / PEFT_CONFIG, *sorted(file.parent.glob(f"*/{LORA_FILE}"))]
    return [file, *(each for each in others if each.is_file())]


def unfit(path: Path, reason: str, remedy: str) -> ConfigError:
    """Return the error for adapters that training cannot start from, with the reason and the remedy."""
    return ConfigError(f"model.lora.start: '{path}' {reason}, so training cannot begin with it. {remedy}.")


def save_lora(pipeline_name: str, folder: Path, name: str, module: Any) -> None:
    """Write the adapter of a module, with its settings as metadata.

    The scale, alpha / rank, is folded into the second matrix and alpha is set to the rank: programs that read only the
    tensors and programs that read the metadata both get the strength of training.

    Args:
        pipeline_name: the diffusers class that will read it.
        module: module with one PEFT adapter, ``default``.
    """
    from peft import get_peft_model_state_dict

    config = module.peft_config["default"].to_dict()
    scale = config["lora_alpha"] / config["r"]
    tensors = get_peft_model_state_dict(module, save_embedding_layers=False)
    layers = {f"{name}_lora_layers": {k: v * scale if ".lora_B." in k else v for k, v in tensors.items()}}
    settings = {f"{name}_lora_adapter_metadata": sorted_sets({**config, "lora_alpha": config["r"]})}
    diffusers_class(pipeline_name).save_lora_weights(folder, weight_name=LORA_FILE, **layers, **settings)
    canonical_header(folder / LORA_FILE)


def save_peft(folder: Path, module: Any) -> None:
    """Write the adapter of a module for peft's ``PeftModel.from_pretrained``."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    (config,) = module.peft_config.values()
    # peft writes sets in an order that differs between processes.
    for setting, value in sorted_sets(vars(config)).items():
        setattr(config, setting, value)
    config.save_pretrained(str(folder))
    # By itself peft adds the frozen weights of an adapted head, which would replace those of the base model.
    tensors = get_peft_model_state_dict(module, save_embedding_layers=False).items()
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors}
    save_file(named, folder / PEFT_FILE, metadata={"format": "pt"})


def sorted_sets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with every set as a sorted list, as the order of sets differs between processes."""
    return {name: sorted(value) if isinstance(value, set | frozenset) else value for name, value in settings.items()}
