"""The one place that loads models, configs, tokenizers and processors of transformers, diffusers and peft.

No code of a model's folder runs, nobody is asked whether it may, and an adapter in a model's folder is not loaded in
silence. ``check_model_folder`` refuses from files alone what loading would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from models.library_loading import read_json, read_weight_index

ADAPTER_CONFIG = "adapter_config.json"
"""What peft calls the settings of an adapter; transformers loads one that it finds beside a model."""
_MIB = 1 << 20
#: Files with vocabularies: their parsers bound depth and numbers themselves.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "*.model")
_MOST_VOCABULARY = 256 * _MIB
_INDICES = ("model_index.json", "modular_model_index.json")
#: Files with settings that libraries read of a folder; others, such as notes of a trainer, are not read.
_SETTINGS = (
    "config.json",
    "generation_config.json",
    *_INDICES,
    "scheduler_config.json",
    "guider_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
#: Keys by which a config of transformers names an attention implementation.
_ATTENTION = ("attn_implementation", "_attn_implementation")
#: Settings of peft whose strings, entries or keys become regular expressions (``peft.tuners.tuners_utils``).
_PATTERNS = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")
#: A name, with the signs of regular expressions that repeat nothing.
_PLAIN = re.compile(r"\^?[\w.\\-]+\$?")
_AGAIN = "Save it again with save_pretrained(), or download it again."


def load_pretrained(loader: Any, source: str | Path, *, label: str, remedy: str = _AGAIN, **options: Any) -> Any:
    """Return what ``loader.from_pretrained(source)`` makes, without any code of the source.

    Args:
        loader: a class of transformers, diffusers or peft.
        source: a folder; an id of the hub where ``options`` say ``local_files_only=False``.
        label: the setting that names the source, for messages.
        remedy: what a person does where it cannot be loaded.
        options: of ``from_pretrained``.

    Raises:
        ConfigError: it needs code of its own, holds an adapter beside a model, has weights that are not finite, or
            cannot be read.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    from models.weights.finite import check_finite

    if Path(source).is_dir():
        check_model_folder(Path(source), label=label)
    never_ask()
    try:
        found = loader.from_pretrained(source, **{"local_files_only": True, **_trust(loader), **options})
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
    # With output_loading_info a report comes with the model.
    loaded = found[0] if isinstance(found, tuple) else found
    if getattr(loaded, "_hf_peft_config_loaded", False):
        raise _holds_adapter(source, label)
    check_finite(loaded, f"{label} '{source}'")
    return found


def auto_from_config(loader: Any, config: Any, *, label: str = "model.path", **options: Any) -> Any:
    """Return a model of random weights that an ``Auto`` class of transformers makes of a config.

    Args:
        loader: the class.
        config: of transformers.
        label: the setting that names the config's folder, for messages.
        options: of ``from_config``.

    Raises:
        ConfigError: the config asks for code of its own, or no such model can be made of it.
    """
    never_ask()
    try:
        return loader.from_config(config, trust_remote_code=False, **options)
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _unloadable(error, getattr(config, "name_or_path", ""), label, _AGAIN) from None


def load_adapter_config(folder: Path) -> Any:
    """Return peft's settings of low-rank adapters in a folder.

    Raises:
        OSError: there are none.
        ValueError: they cannot be read within bounds, hold a regular expression, or name a module to import.
        TypeError: they are of another kind.
    """
    from peft import LoraConfig

    about = read_json(folder / ADAPTER_CONFIG)
    check_patterns(about)
    if about.get("megatron_config"):
        raise ValueError(f"{ADAPTER_CONFIG} names a module to import (megatron_core)")
    return LoraConfig.from_pretrained(str(folder))


def check_patterns(about: Mapping[str, Any]) -> None:
    """Check that names of layers in peft's settings are names: what peft takes as a regular expression could match
    for hours.

    Args:
        about: peft's settings, of a file or of a safetensors header.

    Raises:
        ValueError: one is a regular expression with a repetition, a group or a choice, or no text.
    """
    for setting in _PATTERNS:
        value = about.get(setting) or ()
        if not isinstance(value, str | list | tuple | set | dict):
            raise ValueError(f"{setting} is {str(value)[:60]!r}, no name and no list of names")
        for name in [value] if isinstance(value, str) else value:
            if not _PLAIN.fullmatch(str(name)):
                raise ValueError(f"{setting} has {str(name)[:60]!r}, which is a regular expression and no layer's name")


def never_ask() -> None:
    """Let transformers refuse code of a folder where it would ask on the terminal, in classes inside others too.

    ``resolve_trust_remote_code`` asks only while its time limit is above 0; processors load their tokenizers without
    the argument that would answer it.
    """
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def check_model_folder(folder: Path, *, label: str) -> None:
    """Check what a folder of a model, or of a pipeline and its components, says in its files of settings.

    Args:
        folder: the folder.
        label: the setting that names it, for messages.

    Raises:
        ConfigError: a file cannot be read within bounds, the folder holds an adapter beside a model, or it asks for
            code from elsewhere.
    """
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
    """Check that no component of a pipeline is of a class whose code lies in its folder.

    Args:
        folder: of the pipeline.
        entries: library and class by component, as the folder's index has them.
        label: the setting that names it, for messages.

    Raises:
        ConfigError: one is.
    """
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
    """Check sizes and contents of the files that libraries parse.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is too large, too deep, no JSON object, or holds a number that is not finite.
    """
    for name in _SETTINGS:
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
    about = read_json(config) if config.is_file() else {}
    parts = [about, *(part for part in about.values() if isinstance(part, dict))]
    for named in (part.get(key) for part in parts for key in _ATTENTION):
        if "/" in str(named):
            raise _needs_code(folder, f"its config.json takes attention from '{named}'", label)


def _trust(loader: Any) -> dict[str, bool]:
    """Return the argument that forbids code of a folder, for the classes that take it."""
    made = [kind.__name__ for kind in getattr(loader, "__mro__", ())]
    takes = loader.__name__.startswith("Auto") or {"ProcessorMixin", "DiffusionPipeline"} & set(made)
    return {"trust_remote_code": False} if takes else {}


def _unloadable(error: Exception, source: str | Path, label: str, remedy: str) -> ConfigError:
    said = str(error).strip() or type(error).__name__
    if "trust_remote_code" in said:
        return _needs_code(source, "a class that its files name is in Python files", label)
    if isinstance(error, RecursionError):
        said = "a file is nested too deeply"
    return ConfigError(f"{label} '{source}' cannot be loaded: {' '.join(said.split())[:500].rstrip('.')}. {remedy}")


def _needs_code(source: str | Path, found: str, label: str) -> ConfigError:
    return ConfigError(
        f"{label} '{source}' needs code of its own: {found}. No code of a model is ever run, as it could do anything. "
        "Choose a model whose classes are those of transformers or diffusers, or save it with such classes."
    )


def _holds_adapter(source: str | Path, label: str) -> ConfigError:
    return ConfigError(
        f"{label} '{source}' holds an adapter ({ADAPTER_CONFIG}), which would change the model's weights without being "
        "asked for. To train from a model and an adapter, move the adapter's files to another folder and name that as "
        "model.lora.start; to use the sum of both as a model, merge them with merge_and_unload() of peft and save the "
        "result; else remove the adapter's files."
    )
