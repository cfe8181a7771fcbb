"""LoRA files: written for ``load_lora_weights``, with bytes that depend on their content alone; and others' found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from models.library_loading import diffusers_class
from models.weights.safetensors_header import canonical_header

LORA_FILE = "pytorch_lora_weights.safetensors"
"""What ``load_lora_weights`` looks for (diffusers' ``LORA_WEIGHT_NAME_SAFE``)."""
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What peft's ``save_pretrained`` writes."""


def adapter_file(path: Path) -> Path:
    """Return the safetensors file of adapters to begin as.

    Args:
        path: the file, or a folder in which it has a known name or is the only one.

    Raises:
        ConfigError: there is none, or several.
    """
    path = path.expanduser()
    if path.is_file() and path.suffix == ".safetensors":
        return path
    if path.is_dir():
        known = [path / name for name in (PEFT_FILE, LORA_FILE) if (path / name).is_file()]
        found = known or sorted(path.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        said = f"has {len(found)} safetensors files" if found else "has no safetensors file"
        raise unfit(path, said, "Give the file itself; pickled ones (.bin, .pt) are not read")
    raise unfit(path, "is no safetensors file and no folder", "Paths are relative to the config file")


def adapter_files(path: str | Path) -> list[Path]:
    """Return the files that are read of adapters to begin as: theirs, peft's settings, those of further denoisers.

    Raises:
        ConfigError: there are none.
    """
    path = Path(path).expanduser()
    file = adapter_file(path)
    if file == path:
        beside = [file.parent / PEFT_CONFIG] if file.name == PEFT_FILE else []
    else:
        beside = [file.parent / PEFT_CONFIG, *sorted(file.parent.glob(f"*/{LORA_FILE}"))]
    return [file, *(each for each in beside if each.is_file())]


def unfit(path: Path, found: str, remedy: str) -> ConfigError:
    """Return what is raised where adapters cannot be begun as: what was found there, and what to do."""
    return ConfigError(f"model.lora.start: '{path}' {found}, so training cannot begin with it. {remedy}.")


def save_lora(pipeline_name: str, folder: Path, name: str, module: Any) -> None:
    """Write the adapter of a module, with its settings as metadata.

    The scale, alpha / rank, is folded into the second matrix and alpha set to the rank: what reads the tensors alone
    gives the strength of training, as does what reads the metadata.

    Args:
        pipeline_name: the diffusers class that will read it.
        folder: where to; made when it is not there.
        name: what the pipeline's loader calls the module.
        module: with one PEFT adapter, ``default``.
    """
    from peft import get_peft_model_state_dict

    about = module.peft_config["default"].to_dict()
    scale = about["lora_alpha"] / about["r"]
    tensors = get_peft_model_state_dict(module)
    layers = {f"{name}_lora_layers": {k: v * scale if ".lora_B." in k else v for k, v in tensors.items()}}
    settings = {f"{name}_lora_adapter_metadata": sorted_sets({**about, "lora_alpha": about["r"]})}
    diffusers_class(pipeline_name).save_lora_weights(folder, weight_name=LORA_FILE, **layers, **settings)
    canonical_header(folder / LORA_FILE)


def sorted_sets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with every set as a sorted list; a set's order changes from process to process."""
    return {name: sorted(value) if isinstance(value, set | frozenset) else value for name, value in settings.items()}
