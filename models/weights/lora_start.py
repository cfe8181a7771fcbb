"""Trained adapters to start from: files of peft, and all that diffusers' ``load_lora_weights`` reads, in one format.

The pipelines' own ``lora_state_dict`` maps names and scales of other trainers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from flowmill.models.library_loading import diffusers_class, quiet_libraries, read_json
from flowmill.models.weights.adapter_settings import check_header, check_settings
from flowmill.models.weights.lora import LoraSpec, targeted
from flowmill.models.weights.lora_files import PEFT_CONFIG, PEFT_FILE, adapter_file, unfit
from flowmill.models.weights.pretrained_loading import check_patterns

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Names of matrices and alphas of low-rank adapters, which peft reads or diffusers converts.
_LOW_RANK = re.compile(r"(lora(_[AB]|_down|_up|\d*\.down|\d*\.up)(\.default)?\.weight|\.alpha)$")
_SIDES = re.compile(r"^(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")


@dataclass(frozen=True, slots=True)
class Layer:
    """The adapter of a layer: it adds ``alpha / rank`` * ``up`` @ ``down`` to the weight."""

    down: Tensor
    """(rank, inputs), or (rank, inputs, ...) for a convolution."""
    up: Tensor
    """(outputs, rank) or (outputs, rank, 1, ...)."""
    alpha: float
    """Numerator of the scale."""


class StartAdapter:
    """Adapters by ``module.layer``: the module's name in the model's folder, and the layer's in the model's library."""

    def __init__(self, path: Path, layers: Mapping[str, Layer], *, within: str = "") -> None:
        """Keep the adapters; raise ConfigError if they have several ranks. ``within``: prefix of layers' names that
        other models with the same backbone, such as critics, lack."""
        self._path, self._layers, self._within = path, layers, within
        ranks = sorted({len(layer.down) for layer in layers.values()})
        if len(ranks) != 1:
            raise unfit(path, f"has layers of the ranks {', '.join(map(str, ranks))}", "Give one of a single rank")
        self.rank: int = ranks[0]

    @property
    def alpha(self) -> int:
        """Alpha of all layers; if layers differ or it is not whole, the rank, with scales folded into the weights."""
        alphas = {layer.alpha for layer in self._layers.values()}
        alpha = alphas.pop()
        return self.rank if alphas or alpha != int(alpha) else int(alpha)

    def spec(self, *, rank: int | None, alpha: int | None, targets: Sequence[str] | None) -> LoraSpec:
        """Return the specification of these adapters, after checking it against the config; raise ConfigError if the
        config's value differs."""
        for name, value, number in (("rank", rank, self.rank), ("alpha", alpha, self.alpha)):
            if value is not None and value != number:
                remedy = f"Write model.lora.{name}={number}, or leave it out"
                raise unfit(self._path, f"has {name} {number}, and model.lora.{name} is {value}", remedy)
        names = sorted({name.partition(".")[2].removeprefix(self._within) for name in self._layers})
        others = [name for name in names if targets is not None and not targeted(name, targets)]
        if others:
            reason = f"is also on '{others[0]}', which no entry of model.lora.targets names"
            raise unfit(self._path, reason, "Leave model.lora.targets out: the layers are then the adapter's")
        return LoraSpec(rank=self.rank, alpha=self.alpha, targets=tuple(names if targets is None else targets))

    def weights(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return the trained parameters by name, float32 on the CPU; raise ConfigError if the model has other layers,
        or layers of other sizes. ``shapes``: shapes of the parameters of new adapters of ``spec``, by
        ``module.layer.lora_A.default.weight``."""
        parameters = dict(self._parameters())
        for name in sorted(shapes.keys() | parameters.keys()):
            layer = name.rpartition(".lora_")[0]
            if name not in shapes:
                raise unfit(self._path, f"is on '{layer}', which the model does not have", _OTHER_MODEL)
            if name not in parameters:
                remedy = "Leave model.lora.targets out, or give an adapter of all layers that they name"
                raise unfit(self._path, f"has nothing for '{layer}', which would be trained", remedy)
            if shapes[name] != parameters[name].shape:
                reason = (
                    f"has {tuple(parameters[name].shape)} for '{name}', where the model takes {tuple(shapes[name])}"
                )
                raise unfit(self._path, reason, _OTHER_MODEL)
        return parameters

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        alpha = self.alpha
        for name, layer in self._layers.items():
            yield f"{name}.lora_A.default.weight", layer.down.float().contiguous()
            up = layer.up.float()
            yield (
                f"{name}.lora_B.default.weight",
                (up if layer.alpha == alpha else up * (layer.alpha / alpha)).contiguous(),
            )


_OTHER_MODEL = "Give an adapter of this model"


def peft_adapter(path: str | Path, module: str) -> StartAdapter:
    """Read a folder that ``PeftModel.save_pretrained`` wrote for a language model; raise ConfigError if it is not such
    a folder, or holds other kinds of adapters."""
    file = adapter_file(Path(path))
    if not _is_peft(file):
        raise unfit(Path(path), f"has no {PEFT_CONFIG}", "Give a folder that peft's save_pretrained() wrote")
    layers = dict(_peft_layers(file, module))
    (first, *others) = {name.split(".")[1] for name in layers}
    return StartAdapter(Path(path), layers, within="" if others else f"{first}.")


def pipeline_adapter(path: str | Path, pipeline_name: str, modules: Sequence[str]) -> StartAdapter:
    """Read an adapter of a diffusers pipeline's denoisers; raise ConfigError if there is no adapter, or it is not a
    low-rank adapter of the denoisers. ``path``: a safetensors file, or a folder with one; a subfolder has the adapter
    of the second denoiser."""
    quiet_libraries()
    layers = dict(_pipeline_layers(adapter_file(Path(path)), pipeline_name, modules[0]))
    for module in modules[1:]:
        if (Path(path) / module).is_dir():
            own = _pipeline_layers(adapter_file(Path(path) / module), pipeline_name, modules[0])
            layers |= {f"{module}.{name.partition('.')[2]}": layer for name, layer in own}
    return StartAdapter(Path(path), layers)


def _is_peft(file: Path) -> bool:
    return (file.parent / PEFT_CONFIG).is_file() and file.name == PEFT_FILE


def _names(file: Path) -> list[str]:
    """Return the names of a file's tensors, after checking that all are of low-rank adapters, by names and shapes."""
    try:
        with safe_open(file, "pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            header = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise unfit(file, f"cannot be read ({error})", "Copy it again") from None
    for name, shape in shapes.items():
        if _LOW_RANK.search(name) is None:
            remedy = "Merge it into the model's weights and start from those"
            if name.endswith(".base_layer.weight"):
                # Of an adapted head, from peft. They may differ from those of the base model.
                remedy += ", or save it without (save_embedding_layers=False of peft) if it is the base model's"
            raise unfit(file, f"holds '{name}', which is no matrix or alpha of a low-rank adapter", remedy)
        is_alpha = name.endswith(".alpha")
        if math.prod(shape) != 1 if is_alpha else len(shape) < 2:
            takes = "an alpha is one number" if is_alpha else "a matrix has a rank and inputs or outputs"
            raise unfit(file, f"has '{name}' of shape {shape}, where {takes}", "Copy it again, or give another")
    check_header(file, header)
    return list(shapes)


def _peft_layers(file: Path, module: str) -> Iterator[tuple[str, Layer]]:
    try:
        settings = read_json(file.parent / PEFT_CONFIG)
    except (OSError, ValueError) as error:
        raise unfit(file.parent, f"has settings that cannot be read ({error})", "Copy it again") from None
    check_settings(file.parent, f"its {PEFT_CONFIG}", settings)
    names, tensors = _names(file), load_file(file)
    renamed = {f"{module}.{name.removeprefix('base_model.model.')}": tensors[name] for name in names}
    yield from _paired(file, renamed, module, settings, {})


def _pipeline_layers(file: Path, pipeline_name: str, module: str) -> Iterator[tuple[str, Layer]]:
    if _is_peft(file):
        yield from _peft_layers(file, module)
        return
    names, loader = _names(file), diffusers_class(pipeline_name)
    if not hasattr(loader, "lora_state_dict"):
        # Its transformer reads the format of other pipelines.
        loader = diffusers_class("WanPipeline")
    # Some loaders return alphas that are not in the matrices only with this argument.
    more = {"return_alphas": True} if "return_alphas" in signature(loader.lora_state_dict).parameters else {}
    try:
        state = loader.lora_state_dict(
            str(file.parent),
            weight_name=file.name,
            use_safetensors=True,
            local_files_only=True,
            return_lora_metadata=True,
            **more,
        )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise unfit(file, f"cannot be read as an adapter of {pipeline_name} ({reason})", _OTHER_MODEL) from None
    tensors, settings, alphas = dict(state[0]), state[-1] or {}, (state[1] if len(state) == 3 else None) or {}
    if not any(name.startswith(f"{module}.") for name in tensors):
        # A model's own save_lora_adapter() writes names without the model's.
        tensors = {f"{module}.{name}": tensor for name, tensor in tensors.items()}
    tensors = _in_peft_form(tensors)
    if not tensors:
        raise unfit(file, f"has nothing for {pipeline_name} among its {len(names)} tensors", _OTHER_MODEL)
    own = {name.removeprefix(f"{module}."): value for name, value in settings.items() if name.startswith(f"{module}.")}
    # A model's own save_lora_adapter() writes settings without the model's name.
    settings = own or {name: value for name, value in settings.items() if "." not in name}
    yield from _paired(file, tensors, module, settings, _by_layer(alphas))


def _by_layer(alphas: Mapping[str, Any]) -> dict[str, float]:
    """Return a loader's alphas by layer; those of UNets are named like the matrices."""
    named = _in_peft_form({name.removesuffix(".alpha"): value for name, value in alphas.items()})
    matches = {name: _SIDES.match(name) for name in named}
    return {match["layer"] if (match := matches[name]) else name: float(value) for name, value in named.items()}


def _in_peft_form(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with peft's names of the two matrices (diffusers' ``convert_unet_state_dict_to_peft``)."""
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    done = all(".lora_A." in name or ".lora_B." in name for name in tensors)
    return dict(tensors if done else convert_unet_state_dict_to_peft(tensors))


def _paired(
    file: Path, tensors: Mapping[str, Tensor], module: str, settings: Mapping[str, Any], alphas: Mapping[str, float]
) -> Iterator[tuple[str, Layer]]:
    try:
        check_patterns(settings)
    except ValueError as error:
        raise unfit(file, f"has settings that cannot be followed: {error}", "Give one without") from None
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _SIDES.match(name)
        if match is None or not name.startswith(f"{module}."):
            raise unfit(file, f"holds '{name}'", f"Give an adapter of {module} alone; nothing else is trained")
        sides.setdefault(match["layer"], {})[match["side"]] = tensor
    unknown = sorted(alphas.keys() - sides.keys())
    if unknown:
        raise unfit(file, f"has an alpha for '{unknown[0]}' and no matrices", "Copy it again")
    for layer, both in sides.items():
        if both.keys() != {"A", "B"}:
            raise unfit(file, f"has only one matrix of '{layer}'", "Copy it again")
        rank = len(both["A"])
        alpha = _alpha_of(layer.partition(".")[2], rank, settings) if settings else alphas.get(layer, float(rank))
        yield layer, Layer(both["A"], both["B"], alpha)


def _alpha_of(layer: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Return a layer's alpha from peft's settings, times the root of the rank for rank-stabilized adapters."""
    from peft.utils.other import get_pattern_key

    pattern = settings.get("alpha_pattern") or {}
    alpha = float(pattern.get(get_pattern_key(pattern.keys(), layer), settings.get("lora_alpha", rank)))
    return alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha
