"""A model's weights as its files have them: where they are, and how a model is made that has yet to read its part."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from configs.errors import ConfigError, CorruptError
from models.library_loading import read_weight_index
from models.weights.finite import check_tensors
from models.weights.tensor_files import TensorFiles

if TYPE_CHECKING:
    from torch import Tensor

#: What diffusers and transformers call the file of one component; beside it, of several files, an index.
_NAMES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
_CONVERT = (
    "Weights are read from safetensors files only, since others can hold code. Convert the model where you trust it: "
    "load the pipeline with from_pretrained() of diffusers and write it with save_pretrained(), which writes them."
)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights a component had when it was loaded."""

    files: tuple[Path, ...]
    """Safetensors files."""
    dtypes: Mapping[str, torch.dtype]
    """The dtype each was loaded in, by name; training may hold it in another."""

    @classmethod
    def of(cls, folder: Path, module: nn.Module) -> StoredWeights:
        """Return the weights of a module that was just loaded from a component's folder, or is still to be read."""
        return cls(weight_files(folder), {name: tensor.dtype for name, tensor in module.state_dict().items()})

    @torch.no_grad()
    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors, whole or spread, with what the model had, rounded to the dtype it was loaded in.

        Raises:
            ConfigError: the files lack one or hold weights that are no finite numbers.
        """
        rounded = {
            name: target if target.dtype == self.dtypes[name] else torch.empty_like(target, dtype=self.dtypes[name])
            for name, target in targets.items()
        }
        try:
            TensorFiles(self.files).read_into(rounded)
        except KeyError as error:
            raise ConfigError(
                f"model.path: '{self.files[0].parent}' has no weight {error}, which its config asks for. Save the "
                "model again with save_pretrained(), or download it anew."
            ) from None
        except CorruptError as error:
            raise ConfigError(f"model.path: {error}") from None
        check_tensors(rounded, f"model.path: '{self.files[0].parent}'")
        for name, target in targets.items():
            if rounded[name] is not target:
                target.copy_(rounded[name])

    @torch.no_grad()
    def give(self, module: nn.Module, device: torch.device) -> None:
        """Give a module that was made empty its weights, of spread ones this rank's part; adapters have theirs."""
        found = {name: _allocate(p, device) for name, p in module.named_parameters() if p.is_meta}
        stored = {name: tensor for name, tensor in module.state_dict().items() if not tensor.is_meta}
        buffers = {name: tensor for name, tensor in stored.items() if name in self.dtypes}
        self.read({stored_name(name): tensor for name, tensor in (found | buffers).items()})
        module.load_state_dict(found, strict=False, assign=True)


def empty_model(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Return a diffusers model as ``from_pretrained`` makes it, with its parameters on the meta device.

    Buffers are computed, as no file has all of them; what is stored has its dtype, float32 where the class keeps it so
    (``ModelMixin.from_pretrained`` and ``load_model_dict_into_meta``).

    Args:
        make: makes the model from its config.
        dtype: the dtype it is loaded in.
    """
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            module = make()
    finally:
        torch.set_default_dtype(usual)
    kept: Any = getattr(module, "_keep_in_fp32_modules", None) or ()
    for key, tensor in module.state_dict().items():
        kind = torch.float32 if any(word in key.split(".") for word in kept) else dtype
        if tensor.is_floating_point() and tensor.dtype != kind:
            path, _, name = key.rpartition(".")
            part, cast = module.get_submodule(path), tensor.to(kind)
            setattr(part, name, nn.Parameter(cast) if name in part._parameters else cast)
    return module


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model of which only the config is of use: nothing is computed for it."""
    with torch.device("meta"):
        return make()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a component.

    Raises:
        ConfigError: it has none, or an index of them that cannot be read.
    """
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
    """Check that a pipeline's components have weights that are read without unpickling anything.

    Raises:
        ConfigError: one has none.
    """
    for component in components:
        kinds = {file.suffix for file in (folder / component).glob("*")}
        if kinds & {".bin", ".pt", ".ckpt"} and ".safetensors" not in kinds:
            raise ConfigError(f"model.path: '{folder / component}' has no safetensors file. {_CONVERT}")


def check_variants(folder: Path, components: Sequence[str]) -> None:
    """Check that no component has weights of a variant alone, such as ``model.fp16.safetensors``.

    Raises:
        ConfigError: one has.
    """
    for component in components:
        names = [file.name for file in sorted((folder / component).glob("*.safetensors"))]
        found = [
            re.fullmatch(r"(?:diffusion_pytorch_model|model)\.([^.]+?)(-\d+-of-\d+)?\.safetensors", n) for n in names
        ]
        variants = {match[1] for match in found if match}
        if names and len(variants) == 1 and all(found):
            (variant,) = variants
            raise ConfigError(
                f"model.path: '{folder / component}' has weights of the variant '{variant}' only ({names[0]}), which "
                f"are not looked for. Save the pipeline again: DiffusionPipeline.from_pretrained('{folder}', "
                f"variant='{variant}', dtype='auto').save_pretrained(ANOTHER_FOLDER), with diffusers."
            )


def stored_name(name: str) -> str:
    """Return what a parameter is called in the files; adapters wrap the layers they change."""
    return name.replace(".base_layer.", ".")


def _allocate(empty: Tensor, device: torch.device) -> Tensor:
    """Return memory for a tensor on the meta device, spread as it is."""
    if not isinstance(empty, DTensor):
        return torch.empty_like(empty, device=device)
    own = torch.empty_like(empty.to_local(), device=device)
    return DTensor.from_local(
        own, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
    )
