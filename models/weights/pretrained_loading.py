"""The only module that loads models, configs, tokenizers and processors of transformers, diffusers and peft.

It never runs code from a model's folder, never prompts the user to allow it, and never loads an adapter in a model's
folder silently. ``check_model_folder`` makes the same refusals from the files alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.models.library_loading import read_json, read_weight_index

ADAPTER_CONFIG = "adapter_config.json"
"""File name of peft's adapter settings; transformers loads an adapter that it finds next to a model."""
_MIB = 1 << 20
#: Vocabulary files: their parsers bound depth and numbers themselves.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "*.model")
_MOST_VOCABULARY = 256 * _MIB
_INDICES = ("model_index.json", "modular_model_index.json")
SETTINGS = (
    *_INDICES,
    *(
        f"{name}.json"
        for name in (
            "config generation_config scheduler_config guider_config tokenizer_config special_tokens_map added_tokens "
            "preprocessor_config processor_config video_preprocessor_config chat_template"
        ).split()
    ),
)
"""Settings files that libraries read from a folder; others, such as a trainer's notes, are not read."""
#: Keys of a transformers config that name an attention implementation.
_ATTENTION = ("attn_implementation", "_attn_implementation")
#: Settings that peft uses as regular expressions (``peft.tuners.tuners_utils``).
_PATTERNS = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")
#: A name, which may have regular expression syntax without repetition.
_PLAIN = re.compile(r"\^?[\w.\\-]+\$?")
_AGAIN = "Save it again with save_pretrained(), or download it again."


def load_pretrained(loader: Any, source: str | Path, *, label: str, remedy: str = _AGAIN, **options: Any) -> Any:
    """Return ``loader.from_pretrained(source)``, without running code from the source; raise ConfigError if it needs
    custom code, holds an adapter next to a model, has weights that are not finite, or cannot be read. ``source``: a
    folder, or a hub id with ``local_files_only=False`` in ``options``."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    from flowmill.models.weights.finite import check_finite

    if Path(source).is_dir():
        check_model_folder(Path(source), label=label)
    never_ask()
    try:
        result = loader.from_pretrained(source, **{"local_files_only": True, **_trust(loader), **options})
    except (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RecursionError,
        SafetensorError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        raise _unloadable(error, source, label, remedy) from None
    # With output_loading_info, a report is returned with the model.
    loaded = result[0] if isinstance(result, tuple) else result
    if getattr(loaded, "_hf_peft_config_loaded", False):
        raise _holds_adapter(source, label)
    check_finite(loaded, f"{label} '{source}'")
    return result


def auto_from_config(loader: Any, config: Any, *, label: str = "model.path", **options: Any) -> Any:
    """Return a model with random weights, created from a config by an ``Auto`` class of transformers; raise ConfigError
    if the config needs custom code, or no such model can be created from it."""
    never_ask()
    try:
        return loader.from_config(config, trust_remote_code=False, **options)
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _unloadable(error, getattr(config, "name_or_path", ""), label, _AGAIN) from None


def load_adapter_config(folder: Path) -> Any:
    """Return peft's settings of low-rank adapters in a folder. Raises OSError if there are no settings; ValueError if
    they exceed the bounds of reading, hold a regular expression, or name a module to import; TypeError if they are of
    another kind of adapter."""
    from peft import LoraConfig

    settings = read_json(folder / ADAPTER_CONFIG)
    check_patterns(settings)
    if settings.get("megatron_config"):
        raise ValueError(f"{ADAPTER_CONFIG} names a module to import (megatron_core)")
    return LoraConfig.from_pretrained(str(folder))


def check_patterns(settings: Mapping[str, Any]) -> None:
    """Check that layer names in peft's settings are plain names: peft uses them as regular expressions, which could
    match for hours. Raises ValueError if a name is a regular expression with a repetition, a group or an alternative,
    or not text."""
    for setting in _PATTERNS:
        value = settings.get(setting) or ()
        if not isinstance(value, str | list | tuple | set | dict):
            raise ValueError(f"{setting} is {str(value)[:60]!r}, no name and no list of names")
        for name in [value] if isinstance(value, str) else value:
            if not _PLAIN.fullmatch(str(name)):
                raise ValueError(f"{setting} has {str(name)[:60]!r}, which is a regular expression and no layer's name")


def never_ask() -> None:
    """Make transformers refuse a folder's code without a prompt on the terminal, also in nested classes.
    ``resolve_trust_remote_code`` only prompts if its time limit is above 0; processors load their tokenizers without
    passing on ``trust_remote_code``."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def check_model_folder(folder: Path, *, label: str) -> None:
    """Check the settings files of a model, or of a pipeline and its components; raise ConfigError if a file exceeds the
    bounds of reading, the folder holds an adapter next to a model, or it needs code from elsewhere."""
    for component in _components(folder):
        if (component / ADAPTER_CONFIG).is_file():
            raise _holds_adapter(component, label)
        try:
            _check_component(component)
        except (OSError, ValueError) as error:
            kind = "pipeline" if _is_pipeline(folder) else "model"
            again = "Copy or download it again."
            raise ConfigError(f"{label} '{folder}' is not a whole {kind}: {error}. {again}") from None
        _check_kernels(component, label)


def holds_model(folder: Path) -> bool:
    """Return whether a folder holds a model of transformers or diffusers, or a pipeline."""
    return (folder / "config.json").is_file() or _is_pipeline(folder)


def check_own_code(folder: Path, entries: Mapping[str, Any], *, label: str) -> None:
    """Check that no component's class is defined by code in the pipeline's folder; raise ConfigError. ``entries``:
    library and class by component, from the folder's index."""
    for name, entry in entries.items():
        if isinstance(entry, list) and entry and (folder / name / f"{entry[0]}.py").is_file():
            raise _needs_code(folder, f"its index takes '{name}' from {name}/{entry[0]}.py", label)


def _is_pipeline(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _INDICES)


def _components(folder: Path) -> Iterator[Path]:
    yield folder
    if _is_pipeline(folder):
        yield from sorted(path for path in folder.iterdir() if path.is_dir())


def _check_component(folder: Path) -> None:
    """Check sizes and contents of the files that libraries parse; raise OSError or ValueError."""
    for name in SETTINGS:
        if (folder / name).is_file():
            read_json(folder / name)
    for file in folder.glob("*.safetensors.index*.json"):
        read_weight_index(file)
    for pattern in _VOCABULARIES:
        for file in folder.glob(pattern):
            if file.is_file() and file.stat().st_size > _MOST_VOCABULARY:
                raise ValueError(f"'{file}' has more than {_MOST_VOCABULARY // _MIB} MiB")


def _check_kernels(folder: Path, label: str) -> None:
    config = folder / "config.json"
    fields = read_json(config) if config.is_file() else {}
    parts = [fields, *(part for part in fields.values() if isinstance(part, dict))]
    for named in (part.get(key) for part in parts for key in _ATTENTION):
        if "/" in str(named):
            raise _needs_code(folder, f"its config.json takes attention from '{named}'", label)


def _trust(loader: Any) -> dict[str, bool]:
    """Return the argument that forbids running a folder's code, for the classes that take it."""
    names = [kind.__name__ for kind in getattr(loader, "__mro__", ())]
    takes = loader.__name__.startswith("Auto") or {"ProcessorMixin", "DiffusionPipeline"} & set(names)
    return {"trust_remote_code": False} if takes else {}


def _unloadable(error: Exception, source: str | Path, label: str, remedy: str) -> ConfigError:
    reason = str(error).strip() or type(error).__name__
    if "trust_remote_code" in reason:
        return _needs_code(source, "a class that its files name is in Python files", label)
    if isinstance(error, RecursionError):
        reason = "a file is nested too deeply"
    return ConfigError(f"{label} '{source}' cannot be loaded: {' '.join(reason.split())[:500].rstrip('.')}. {remedy}")


def _needs_code(source: str | Path, reason: str, label: str) -> ConfigError:
    return ConfigError(
        f"{label} '{source}' needs code of its own: {reason}. No code of a model is ever run, as it could do anything. "
        "Choose a model whose classes are those of transformers or diffusers, or save it with such classes."
    )


def _holds_adapter(source: str | Path, label: str) -> ConfigError:
    return ConfigError(
        f"{label} '{source}' holds an adapter ({ADAPTER_CONFIG}), which would silently change the model's weights. "
        "To train from a model and an adapter, move the adapter's files to another folder and name that as "
        "model.lora.start; to use the sum of both as a model, merge them with merge_and_unload() of peft and save the "
        "result; else remove the adapter's files."
    )
