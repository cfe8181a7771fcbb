"""A model's weights in its files: their location, and models that are created empty and read their part later."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError, CorruptError
from flowmill.models.library_loading import read_weight_index
from flowmill.models.weights.converted import Conversion, fill, stored_forms
from flowmill.models.weights.finite import check_tensors

#: File names of a component in diffusers and transformers; several files have an index next to them.
_NAMES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
_CONVERT = (
    "Weights are read from safetensors files only, since others can hold code. Convert the model where you trust it: "
    "load the pipeline with from_pretrained() of diffusers and write it with save_pretrained(), which writes them."
)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights a component had when it was loaded."""

    files: tuple[Path, ...]
    dtypes: Mapping[str, torch.dtype]
    """The dtype of each weight when it was loaded, by name; training may use another."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of weights in the files, where those differ."""
    converted: Mapping[str, Conversion] = field(default_factory=dict)
    """How weights that the files have in another form are made, by name."""

    @classmethod
    def of(cls, folder: Path, module: nn.Module) -> StoredWeights:
        """Return the stored weights of a module that was just loaded from a component's folder or created empty."""
        from flowmill.models.weights.tensor_files import TensorFiles

        files, own = weight_files(folder), module.state_dict()
        dtypes = {name: tensor.dtype for name, tensor in own.items()}
        if not hasattr(module, "base_model_prefix"):
            return cls(files, dtypes)
        try:
            names, converted = stored_forms(module, own, TensorFiles(files).shapes)
        except CorruptError as error:
            raise ConfigError(f"model.path: {error}") from None
        for pair in _tied(module):
            # Files may hold either.
            for name, other in (pair, pair[::-1]):
                if name in names:
                    names.setdefault(other, names[name])
        return cls(files, dtypes, names, converted)

    @torch.no_grad()
    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors, whole or sharded, with the stored weights, rounded to the dtype they were loaded in; raise
        ConfigError if the files lack a weight, or hold one that is not finite."""
        rounded = {
            name: target if target.dtype == self.dtypes[name] else torch.empty_like(target, dtype=self.dtypes[name])
            for name, target in targets.items()
        }
        try:
            self._fill(rounded)
        except KeyError as error:
            raise ConfigError(
                f"model.path: '{self.files[0].parent}' has no weight {error}, which its config requires. Save the "
                "model again with save_pretrained(), or download it again."
            ) from None
        except CorruptError as error:
            raise ConfigError(f"model.path: {error}") from None
        check_tensors(rounded, f"model.path: '{self.files[0].parent}'")
        for name, target in targets.items():
            if rounded[name] is not target:
                target.copy_(rounded[name])

    def _fill(self, targets: Mapping[str, Tensor]) -> None:
        from flowmill.models.weights.tensor_files import TensorFiles

        files, converted = TensorFiles(self.files), self.converted
        files.read_into({self.names.get(name, name): each for name, each in targets.items() if name not in converted})
        # One at a time, as their parts are whole even where targets are sharded.
        for conversion in {id(each): each for name, each in converted.items() if name in targets}.values():
            shapes, dtype = files.shapes, self.dtypes[conversion.first]
            parts = {name: torch.empty(shapes[name], dtype=dtype) for name in conversion.sources}
            files.read_into(parts)
            for name, weight in conversion.of(parts).items():
                if name in targets:
                    fill(targets[name], weight, name)

    @torch.no_grad()
    def give(self, module: nn.Module, device: torch.device) -> None:
        """Load the weights of a module created empty, or this rank's part if it is sharded; adapters have theirs."""
        empty = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.is_meta}
        # Of tied parameters the first is read, and all are that one again.
        allocated = {p: nn.Parameter(_allocate(p, device), p.requires_grad) for p in empty.values()}
        parameters = {name: allocated[p] for name, p in empty.items()}
        stored = {name: tensor for name, tensor in module.state_dict().items() if not tensor.is_meta}
        buffers = {name: tensor for name, tensor in stored.items() if name in self.dtypes}
        read = {name: parameters[name] for name, _ in module.named_parameters() if name in parameters} | buffers
        self.read({stored_name(name): tensor for name, tensor in read.items()})
        module.load_state_dict(parameters, strict=False, assign=True)

    def untie(self, module: nn.Module) -> None:
        """Make tied weights of a module created empty two parameters if the files hold other values for each, as
        ``from_pretrained`` does."""
        for name, other in _tied(module):
            if self.names.get(name) == self.names.get(other):
                continue
            pair = {
                each: torch.empty_like(module.get_parameter(each), dtype=self.dtypes[each], device="cpu")
                for each in (name, other)
            }
            self.read(pair)
            if not torch.equal(pair[name], pair[other]):
                path, _, last = name.rpartition(".")
                setattr(module.get_submodule(path), last, nn.Parameter(torch.empty_like(module.get_parameter(name))))


def empty_model(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Return a diffusers model as from ``from_pretrained``, with its parameters on the meta device. Buffers are
    computed, as files do not have all of them. Stored tensors get ``dtype``, or float32 if the class keeps them in it
    (``ModelMixin.from_pretrained`` and ``load_model_dict_into_meta``)."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            module = make()
    finally:
        torch.set_default_dtype(usual)
    float32_names: Any = getattr(module, "_keep_in_fp32_modules", None) or ()
    for key, tensor in module.state_dict().items():
        kind = torch.float32 if any(word in key.split(".") for word in float32_names) else dtype
        if tensor.is_floating_point() and tensor.dtype != kind:
            path, _, name = key.rpartition(".")
            part, cast = module.get_submodule(path), tensor.to(kind)
            setattr(part, name, nn.Parameter(cast) if name in part._parameters else cast)
    tie: Any = getattr(module, "tie_weights", None)
    if tie is not None:
        # Registering tied parameters, which replaced each, has untied them.
        tie()
    return module


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model on the meta device, for its structure: no weights are computed."""
    with torch.device("meta"):
        return make()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a component; raise ConfigError if it has no such files, or their index cannot be
    read."""
    for name in _NAMES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                listed = read_weight_index(index)
            except ValueError as error:
                raise ConfigError(f"model.path: {error}. Copy or download the model again.") from None
            return tuple(folder / part for part in sorted(set(listed.values())))
        if (folder / name).is_file():
            return (folder / name,)
    raise ConfigError(f"model.path: '{folder}' has no {' or '.join(_NAMES)}. {_CONVERT}")


def check_safetensors(folder: Path, components: Sequence[str]) -> None:
    """Check that a pipeline's components have safetensors files if they have weights; raise ConfigError."""
    for component in components:
        kinds = {file.suffix for file in (folder / component).glob("*")}
        if kinds & {".bin", ".pt", ".ckpt"} and ".safetensors" not in kinds:
            raise ConfigError(f"model.path: '{folder / component}' has no safetensors file. {_CONVERT}")


def check_variants(folder: Path, components: Sequence[str]) -> None:
    """Check that no component has only weights of a variant, such as ``model.fp16.safetensors``; raise ConfigError."""
    for component in components:
        names = [file.name for file in sorted((folder / component).glob("*.safetensors"))]
        matches = [
            re.fullmatch(r"(?:diffusion_pytorch_model|model)\.([^.]+?)(-\d+-of-\d+)?\.safetensors", n) for n in names
        ]
        variants = {match[1] for match in matches if match}
        if names and len(variants) == 1 and all(matches):
            (variant,) = variants
            raise ConfigError(
                f"model.path: '{folder / component}' has weights of the variant '{variant}' only ({names[0]}), which "
                f"are not looked for. Save the pipeline again: DiffusionPipeline.from_pretrained('{folder}', "
                f"variant='{variant}', dtype='auto').save_pretrained(ANOTHER_FOLDER), with diffusers."
            )


def stored_name(name: str) -> str:
    """Return the name of a parameter in the files; adapters wrap the layers they change."""
    return name.replace(".base_layer.", ".")


def _tied(module: nn.Module) -> list[tuple[str, str]]:
    """Return the pairs of a module's tied weights, which only models of transformers have."""
    return list(getattr(module, "all_tied_weights_keys", {}).items())


def _allocate(empty: Tensor, device: torch.device) -> Tensor:
    """Return uninitialized memory for a tensor on the meta device, sharded like it."""
    from torch.distributed.tensor import DTensor

    if not isinstance(empty, DTensor):
        return torch.empty_like(empty, device=device)
    own = torch.empty_like(empty.to_local(), device=device)
    return DTensor.from_local(
        own, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
    )
