"""Converts single files of weights, in the layout of a model's authors, to the components of a diffusers folder.

diffusers' converters, those of ``from_single_file``, map the names. This module assigns names to components, and checks
that no tensor is missing, left over or of another size. The checks only read headers: converters move and split tensors
independently of their values.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.errors import ConfigError
from models.library_loading import diffusers_class, read_json
from models.weights.pretrained_loading import load_pretrained
from models.weights.stored_weights import on_meta

#: Prefix of a denoiser's names; files with only a denoiser may have no prefix.
_DENOISER = "model.diffusion_model."
#: Prefixes of the names of other components.
_PREFIXES = {
    "first_stage_model.": "vae",
    "vae.": "vae",
    "audio_vae.": "audio_vae",
    "cond_stage_model.transformer.": "text_encoder",
    "cond_stage_model.model.": "text_encoder",
    "conditioner.embedders.0.transformer.": "text_encoder",
    "conditioner.embedders.1.model.": "text_encoder_2",
    "text_encoders.clip_l.transformer.": "text_encoder",
    "text_encoders.clip_g.transformer.": "text_encoder_2",
}
#: Prefix of a T5, the last of the text encoders: second in FLUX, third in Stable Diffusion 3.
_T5 = "text_encoders.t5xxl.transformer."
#: Text encoders of open_clip, whose layers differ from those of transformers.
_OPEN_CLIP = ("cond_stage_model.model.", "conditioner.embedders.1.model.")
#: A text encoder without a projection of pooled text; the projection in transformers is then the identity.
_UNPROJECTED = "text_encoders.clip_l.transformer."
#: Names of no component: schedulers' tables, averages of training, unused positions and scales.
_IGNORED = re.compile(
    r"((sqrt_|log_)?(one_minus_|recip_|recipm1_)?alphas_cumprod(_prev)?|betas|posterior_\w+|logvar|denoiser\.sigmas"
    r"|scale_factor|model_ema\..+|.+\.position_ids|.+\.logit_scale)"
)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_MODEL = "Give a file of the model that model.path is, or the path of the model that this file is of"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A component in a file."""

    name: str
    """Its name in the folder's index."""
    file: Path
    names: dict[str, str]
    """Names of its tensors in the file, by the names without the common prefix."""
    prefix: str
    whole: bool
    """All components of the file are used."""

    def tensors(self, *, empty: bool) -> dict[str, Tensor]:
        """Return its tensors by their names without the prefix, on the meta device if ``empty``; raise ConfigError if
        they have a quantized dtype."""
        found = {}
        with _opened(self.file) as opened:
            for name, stored in self.names.items():
                about = opened.get_slice(stored)
                if about.get_dtype() not in _DTYPES:
                    kinds = ", ".join(_DTYPES)
                    raise unfit(
                        self.file,
                        f"has '{stored}' as {about.get_dtype()}, which is rounded for speed",
                        f"Give one whose weights are {kinds}, or take its other components only: "
                        "model.single_file={COMPONENT: FILE}",
                    )
                shape, kind = about.get_shape(), _DTYPES[about.get_dtype()]
                found[name] = torch.empty(shape, dtype=kind, device="meta") if empty else opened.get_tensor(stored)
        return found


def unfit(path: Path, found: str, remedy: str) -> ConfigError:
    """Return the error for a file that cannot be a base model, with the reason and the remedy."""
    return ConfigError(f"model.single_file: '{path}' {found}, so no run can start from it. {remedy}.")


def held_parts(
    files: Mapping[str, str], denoisers: Sequence[str], *, texts: Sequence[str] = ("text_encoder",)
) -> dict[str, HeldPart]:
    """Return the components in files, by name; raise ConfigError if a file is missing, pickled or unreadable, has
    unknown tensors, or lacks its component. ``files``: paths by the component to use; under '' a file of which all
    components are used."""
    parts: dict[str, HeldPart] = {}
    for component, file in files.items():
        path = Path(file).expanduser()
        held = _by_component(path, component or denoisers[0], texts[-1], whole=not component)
        if component and component not in held:
            known = ", ".join(name or "a denoiser" for name in held)
            raise unfit(path, f"holds {known} and no {component}", "Give another file for it")
        parts |= {component: held[component]} if component else held
    return parts


def _by_component(path: Path, alone: str, last_text: str, *, whole: bool) -> dict[str, HeldPart]:
    """Return the tensors of a file by component; if no name has a known prefix, all belong to ``alone``."""
    if path.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        remedy = "Convert it where you trust it: safetensors.torch.save_file(torch.load(FILE)['state_dict'], NEW_FILE)"
        raise unfit(path, "is pickled and can run any code when it is loaded, which flowmill never does", remedy)
    if not path.is_file() or path.suffix != ".safetensors":
        raise unfit(path, "is no safetensors file", "Paths are relative to the config file")
    with _opened(path) as opened:
        names = [name for name in sorted(opened.keys()) if not _IGNORED.fullmatch(name)]
    known = {**_PREFIXES, _T5: last_text}
    known[_DENOISER] = "" if alone in known.values() else alone
    found: dict[str, HeldPart] = {}
    made = partial(HeldPart, file=path, whole=whole)
    if not any(name.startswith(tuple(known)) for name in names):
        return {alone: made(name=alone, names={name: name for name in names}, prefix="")}
    for name in names:
        prefix = next((each for each in known if name.startswith(each)), None)
        if prefix is not None:
            one = found.setdefault(known[prefix], made(name=known[prefix], names={}, prefix=prefix))
            one.names[name.removeprefix(prefix)] = name
        elif whole:
            remedy = "Say which of its components to take: model.single_file={COMPONENT: FILE}"
            raise unfit(path, f"holds '{name}', which is of no known component", remedy)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; raise ConfigError if it cannot be read."""
    try:
        opened = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise unfit(path, f"cannot be read ({error})", "Copy or download it again") from None
    with opened as file:
        yield file


def check_part(part: HeldPart, folder: Path, entry: Sequence[str]) -> None:
    """Check, without reading tensors, that a file's component fits the config in a folder; raise ConfigError if it is
    another model: names are missing or left over, or sizes differ. ``entry``: library and class of the component, from
    the folder's index."""
    _converted(part, _empty(folder / part.name, entry), empty=True)


def write_part(part: HeldPart, folder: Path, entry: Sequence[str], target: Path) -> None:
    """Write a file's component as a folder, with the config of another folder; raise ConfigError if it is another
    model."""
    module = _empty(folder / part.name, entry)
    module.load_state_dict(_converted(part, module, empty=False), strict=False, assign=True)
    if entry[0] == "transformers":
        module.tie_weights()
    module.save_pretrained(target)
    # Libraries add notes about the process to the config, so the original files replace it.
    for path in (folder / part.name).glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)


def _empty(folder: Path, entry: Sequence[str]) -> Any:
    """Return a component without weights; raise ConfigError if its config is missing or invalid."""
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(
            f"model.path: '{folder.parent}' has no {folder.name}/config.json, which describes this component of "
            "model.single_file. Copy or download it again."
        )
    try:
        return on_meta(partial(_made, folder, *entry))
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.path: '{folder.parent}' says its {folder.name} is a {' '.join(map(str, entry))}, which is none "
            f"that {folder.name}/config.json describes: {_first_line(error)}. Copy or download it again."
        ) from None


def _made(folder: Path, library: str, name: str) -> Any:
    if library == "diffusers":
        return diffusers_class(name).from_config(read_json(folder / "config.json"))
    if library != "transformers":
        raise ValueError(f"classes of {library} have no single files")
    import transformers

    made = getattr(transformers, name)
    return made(load_pretrained(made.config_class, folder, label="model.path"))


def _converted(part: HeldPart, module: Any, *, empty: bool) -> dict[str, Tensor]:
    """Return a component's tensors by the names of its class, after checking that names and shapes match exactly."""
    wanted, tensors, made = module.state_dict(), part.tensors(empty=empty), type(module).__name__
    try:
        found = tensors if tensors.keys() == wanted.keys() else _convert(part, module, tensors)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise unfit(part.file, f"is no {made} as {part.name} ({_first_line(error)})", _OTHER_MODEL) from None
    # Views are cloned: saving would write their whole storage.
    for name, tensor in found.items():
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        found[name] = tensor.clone() if is_view else tensor.contiguous()
    tied = set(getattr(module, "_tied_weights_keys", None) or ())
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found and name not in tied:
            raise unfit(part.file, f"has nothing for '{part.name}.{name}' of a {made}", _OTHER_MODEL)
        if name not in wanted:
            raise unfit(part.file, f"holds '{part.name}.{name}', which its {made} does not have", _OTHER_MODEL)
        if name in found and found[name].shape != wanted[name].shape:
            sizes = f"{tuple(found[name].shape)} for '{part.name}.{name}', where its config asks for"
            raise unfit(part.file, f"has {sizes} {tuple(wanted[name].shape)}", _OTHER_MODEL)
    return found


def _convert(part: HeldPart, module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a component's tensors with the names of diffusers' converters. Raises ConfigError if diffusers has no
    converter for the component, or the converter leaves tensors over; KeyError if a tensor is missing; converters also
    raise other exceptions."""
    if part.name.startswith("text_encoder"):
        return _text_encoder(part, module, tensors)
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    made = type(module).__name__
    if made not in SINGLE_FILE_LOADABLE_CLASSES:
        remedy = "Give a pipeline folder that holds these weights as model.path, and no file"
        raise unfit(part.file, f"holds {part.name}, and diffusers converts no file to a {made}", remedy)
    # The converter only finds names of a UNet with this prefix.
    prefix = part.prefix or (_DENOISER if made == "UNet2DConditionModel" else "")
    left = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    found = SINGLE_FILE_LOADABLE_CLASSES[made]["checkpoint_mapping_fn"](config=dict(module.config), checkpoint=left)
    if found is not left and 0 < len(left) < len(tensors):
        # Converters that pop known names leave the unknown ones.
        raise unfit(part.file, f"holds '{min(left)}', which no {made} has", _OTHER_MODEL)
    return dict(found)


def _text_encoder(part: HeldPart, module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a text encoder's tensors with transformers' names (``create_diffusers_clip_model_from_ldm``)."""
    found = dict(tensors)
    if part.prefix in _OPEN_CLIP:
        from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

        whole = {f"{part.prefix}{name}": tensor for name, tensor in found.items()}
        found = convert_open_clip_checkpoint(module, whole, prefix=part.prefix)
    if not hasattr(module, "text_model"):
        found = {name.removeprefix("text_model."): tensor for name, tensor in found.items()}
    if part.prefix == _UNPROJECTED and hasattr(module, "text_projection"):
        like = next(iter(found.values()))
        found["text_projection.weight"] = torch.eye(module.config.hidden_size, dtype=like.dtype, device=like.device)
    return found


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, IndexError):
        return "it has none of its layers"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
