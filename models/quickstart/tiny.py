"""Tiny real pipelines of every model family, with random weights: the real classes and latent geometry, small widths.

They are for trying a config end to end, and for tests; they generate noise. A new family is an entry in ``tiny.yaml``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
import transformers
from diffusers.pipelines import ltx2
from torch import nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import resolve
from flowmill.configs.suggestions import did_you_mean
from flowmill.models.library_loading import quiet_libraries, read_json
from flowmill.models.policies import POLICIES
from flowmill.models.policies.pipeline_index import MODULAR, component_entry, in_folder, index_file, portable_index
from flowmill.models.quickstart import tiny_families
from flowmill.models.quickstart.text import TOKENIZERS

#: Fields of a part that are not fields of its config.
_OWN_FIELDS = ("is", "of")
#: Prefix of parts that are drawn before others and then dropped.
_UNUSED = "unused_"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyBuilder:
    """A random pipeline of one family."""

    family: str = "sd3"
    """Model family, as in ``model.policy``."""
    seed: int = 0
    """Seed of the weights."""

    latents: ClassVar[None] = None
    """Latent sizes differ by family."""

    def build(self, folder: Path, report: Callable[[str, int, int], None]) -> None:
        """Write a diffusers folder."""
        report("tiny pipeline", 0, 1)
        build_tiny(self.family, self.seed).save_pretrained(folder)
        report("tiny pipeline", 1, 1)


def build_tiny(family: str, seed: int = 0, *, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Return the tiny pipeline of a family; equal seeds give equal weights. Raises ConfigError if there is no such
    family. ``changes``: other values of config fields, by part."""
    quiet_libraries()
    families = tiny_families()
    if family not in families:
        raise ConfigError(f"model.build: there is no tiny pipeline of '{family}'. {did_you_mean(family, families)}")
    described = dict(families[family])
    parts: dict[str, Any] = {}
    pipeline, processor = described.pop("pipeline", None), described.pop("processor_files", None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, fields in described.items():
            parts[name] = _part(fields, parts, (changes or {}).get(name, {}))
    parts = {name: part for name, part in parts.items() if not name.startswith(_UNUSED)}
    if processor is not None:
        return _WithProcessor(family, pipeline, parts, **processor)
    return _assembled(pipeline, parts)


def _assembled(pipeline: Any, parts: Mapping[str, Any]) -> Any:
    fields = {"is": pipeline} if isinstance(pipeline, str) else pipeline
    return _class_of(fields["is"])(**parts, **_without(fields))


def _without(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in _OWN_FIELDS}


def _part(fields: Any, parts: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Return a new part of a pipeline, see ``tiny.yaml``."""
    if isinstance(fields, str):
        return TOKENIZERS[fields]()
    kind, of = _class_of(fields["is"]), fields.get("of")
    tokenizer = None if of is None else getattr(parts[of], "tokenizer", parts[of])
    config = {**_valued(_without(fields), tokenizer), **changes}
    if hasattr(kind, "config_class"):
        part = kind(kind.config_class(**config))
    else:
        # Some published configs have fields that the class ignores.
        part = kind.from_config(config) if hasattr(kind, "from_config") else kind(**config)
    _START.get(fields["is"], lambda part: None)(part)
    return part.eval() if isinstance(part, nn.Module) else part


def _class_of(name: str) -> Any:
    for library in (diffusers, transformers, ltx2):
        if (kind := getattr(library, name, None)) is not None:
            return kind
    raise AttributeError(f"neither diffusers nor transformers has a class {name}")


def _valued(value: Any, tokenizer: Any) -> Any:
    """Return a field's value, with numbers of the tokenizer and repeated values in full."""
    if isinstance(value, str) and value.startswith("$"):
        return len(tokenizer) if value == "$size" else tokenizer.convert_tokens_to_ids(value[1:])
    if isinstance(value, list):
        return [_valued(each, tokenizer) for each in value]
    if not isinstance(value, dict):
        return value
    if "repeat" in value:
        return [value["repeat"]] * value["times"]
    return {key: _valued(each, tokenizer) for key, each in value.items()}


def _vocoder(vocoder: nn.Module) -> None:
    """Draw other weights: with the default ones it hums for any spectrogram."""
    for weights in vocoder.parameters():
        nn.init.zeros_(weights) if weights.ndim == 1 else nn.init.kaiming_normal_(weights, mode="fan_out")


_START: Mapping[str, Callable[[Any], None]] = {"LTX2Vocoder": _vocoder}


class _WithProcessor:
    """A pipeline with a processor of Qwen. transformers creates the processor only with torchvision, so its files are
    written without it. The index of a modular repository does not contain its path."""

    def __init__(self, family: str, pipeline: Any, parts: Mapping[str, Any], **processor: Any) -> None:
        """Keep the parts; ``processor`` has the part's name, its class, and settings of images."""
        self._family, self._pipeline, self._parts, self._processor = family, pipeline, parts, processor

    def save_pretrained(self, folder: Path) -> None:
        if self._pipeline is None:
            pipeline = resolve(POLICIES, self._family, label="model.policy").pipeline_blocks().init_pipeline()
            pipeline.update_components(**self._parts)
            pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
        else:
            _assembled(self._pipeline, self._parts).save_pretrained(folder)
        images = dict(self._processor)
        name, kind = images.pop("part"), images.pop("class")
        target, path = Path(folder) / name, index_file(Path(folder))
        transformers.Qwen2VLImageProcessorPil(**images).save_pretrained(target)
        if not (target / "tokenizer.json").is_file():
            self._parts["tokenizer"].save_pretrained(target)
        index, modular = read_json(path), path.name == MODULAR
        if modular:
            index = portable_index(index, in_folder(path.parent))
        index[name] = component_entry(path.name, name, "transformers", kind)
        path.write_text(json.dumps(index, indent=2, sort_keys=modular) + "\n" * modular)
