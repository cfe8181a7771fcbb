"""Single files of weights, in the layout of a model's authors, as the components of a diffusers folder.

What their names mean is known to diffusers' converters, those of ``from_single_file``. Here are which component a name
is of, and that nothing is missing, left over or of another size, for which the header alone is read: converters move
and split tensors, whatever they hold.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from configs.errors import ConfigError
from models.library_loading import diffusers_class, read_json
from models.weights.pretrained_loading import load_pretrained
from models.weights.stored_weights import on_meta

if TYPE_CHECKING:
    from torch import Tensor

#: What names begin with that are of the denoiser; files of a denoiser alone may have nothing before theirs.
_DENOISER = "model.diffusion_model."
#: What the names of other components begin with.
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
#: Of a T5, which is the last of the text encoders, second in FLUX and third in Stable Diffusion 3.
_T5 = "text_encoders.t5xxl.transformer."
#: Text encoders of open_clip, whose layers are other ones than those of transformers.
_OPEN_CLIP = ("cond_stage_model.model.", "conditioner.embedders.1.model.")
#: One whose pooled text is not projected; the layer that projects it in transformers then has to change nothing.
_UNPROJECTED = "text_encoders.clip_l.transformer."
#: What no component has: tables that schedulers compute, averages of training, positions and scales that are not used.
_BESIDE = re.compile(
    r"((sqrt_|log_)?(one_minus_|recip_|recipm1_)?alphas_cumprod(_prev)?|betas|posterior_\w+|logvar|denoiser\.sigmas"
    r"|scale_factor|model_ema\..+|.+\.position_ids|.+\.logit_scale)"
)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_MODEL = "Give a file of the model that model.path is, or the path of the model that this file is of"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A component that a file holds."""

    name: str
    """What the folder's index calls it."""
    file: Path
    """The file."""
    names: Mapping[str, str]
    """What its tensors are called in the file, by that name without what is common to all."""
    prefix: str
    """What is common to all."""
    whole: bool
    """The file is taken for all it holds."""

    def tensors(self, *, empty: bool) -> dict[str, Tensor]:
        """Return its tensors by their own names, or with ``empty`` their shapes alone, on the meta device.

        Raises:
            ConfigError: they are of a kind that loses too much to begin with.
        """
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


@dataclass(slots=True)
class _Found:
    names: dict[str, str] = field(default_factory=dict)
    prefix: str = ""


def unfit(path: Path, found: str, remedy: str) -> ConfigError:
    """Return what is raised where a file cannot be a base model: what was found there, and what to do."""
    return ConfigError(f"model.single_file: '{path}' {found}, so no run can start from it. {remedy}.")


def held_parts(
    files: Mapping[str, str], denoisers: Sequence[str], *, texts: Sequence[str] = ("text_encoder",)
) -> dict[str, HeldPart]:
    """Return what files hold, by component.

    Args:
        files: by component, whose part alone is taken of it; or by '' one that is taken for all it holds.
        denoisers: what the components are called that are trained.
        texts: what the text encoders are called.

    Raises:
        ConfigError: a file is missing, pickled or unreadable, holds something else, or lacks its component.
    """
    parts: dict[str, HeldPart] = {}
    for component, said in files.items():
        path = Path(said).expanduser()
        held = _by_component(path, component or denoisers[0], texts[-1], strict=not component)
        if component and component not in held:
            known = ", ".join(name or "a denoiser" for name in held)
            raise unfit(path, f"holds {known} and no {component}", "Give another file for it")
        wanted = {component: held[component]} if component else held
        parts |= {
            name: HeldPart(name=name, file=path, names=one.names, prefix=one.prefix, whole=not component)
            for name, one in wanted.items()
        }
    return parts


def _by_component(path: Path, alone: str, last_text: str, *, strict: bool) -> dict[str, _Found]:
    """Return the tensors of a file by component; where no name says of which they are, all are of the one ``alone``."""
    if path.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        remedy = "Convert it where you trust it: safetensors.torch.save_file(torch.load(FILE)['state_dict'], NEW_FILE)"
        raise unfit(path, "is pickled and can run any code when it is loaded, which flowmill never does", remedy)
    if not path.is_file() or path.suffix != ".safetensors":
        raise unfit(path, "is no safetensors file", "Paths are relative to the config file")
    with _opened(path) as opened:
        names = [name for name in sorted(opened.keys()) if not _BESIDE.fullmatch(name)]
    known = {**_PREFIXES, _T5: last_text}
    known[_DENOISER] = "" if alone in known.values() else alone
    found: dict[str, _Found] = {}
    if not any(name.startswith(tuple(known)) for name in names):
        return {alone: _Found({name: name for name in names})}
    for name in names:
        prefix = next((each for each in known if name.startswith(each)), None)
        if prefix is not None:
            one = found.setdefault(known[prefix], _Found(prefix=prefix))
            one.names[name.removeprefix(prefix)] = name
        elif strict:
            remedy = "Say which of its components to take: model.single_file={COMPONENT: FILE}"
            raise unfit(path, f"holds '{name}', which is of no component that is known here", remedy)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file's tensors.

    Raises:
        ConfigError: it is no safetensors file, or is cut off.
    """
    try:
        opened = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise unfit(path, f"cannot be read ({error})", "Copy or download it again") from None
    with opened as file:
        yield file


def check_part(part: HeldPart, folder: Path, entry: Sequence[str]) -> None:
    """Check that a file holds a component as a folder describes it; no tensor is read.

    Args:
        part: what the file holds.
        folder: of the pipeline.
        entry: library and class of the component, as the folder's index has them.

    Raises:
        ConfigError: it is another model: names are missing or left over, or have other sizes.
    """
    _converted(part, _empty(folder / part.name, entry), empty=True)


def write_part(part: HeldPart, folder: Path, entry: Sequence[str], target: Path) -> None:
    """Write a component that a file holds as the folder of a component, with the config of another folder.

    Args:
        part: what the file holds.
        folder: of the pipeline whose config it is of.
        entry: library and class of the component, as that folder's index has them.
        target: the component's folder.

    Raises:
        ConfigError: it is another model.
    """
    module = _empty(folder / part.name, entry)
    module.load_state_dict(_converted(part, module, empty=False), strict=False, assign=True)
    if entry[0] == "transformers":
        module.tie_weights()
    module.save_pretrained(target)
    # What libraries note in it of the process is not the model's.
    for path in (folder / part.name).glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)


def _empty(folder: Path, entry: Sequence[str]) -> Any:
    """Return a component without weights.

    Raises:
        ConfigError: the folder has no config of it, or one that is of no use.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(
            f"model.path: '{folder.parent}' has no {folder.name}/config.json, which says what model.single_file holds "
            "there. Copy or download it again."
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
    """Return a component's tensors by the names of its class, checked to be all of it and nothing else."""
    wanted, tensors, made = module.state_dict(), part.tensors(empty=empty), type(module).__name__
    try:
        found = tensors if tensors.keys() == wanted.keys() else _convert(part, module, tensors)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise unfit(part.file, f"is no {made} as {part.name} ({_first_line(error)})", _OTHER_MODEL) from None
    # Tensors that are parts of others would be written with all of these.
    found = {name: tensor.clone() if _is_part(tensor) else tensor.contiguous() for name, tensor in found.items()}
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
    """Return a component's tensors as diffusers' converters name them.

    Raises:
        ConfigError: diffusers knows no other names of such a component, or has none for some of these.
        KeyError: something is missing; other exceptions likewise.
    """
    if part.name.startswith("text_encoder"):
        return _text_encoder(part, module, tensors)
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    made = type(module).__name__
    if made not in SINGLE_FILE_LOADABLE_CLASSES:
        remedy = "Give a pipeline folder that holds these weights as model.path, and no file"
        raise unfit(part.file, f"holds {part.name}, and diffusers converts no file to a {made}", remedy)
    # It looks for names of a UNet behind this alone.
    prefix = part.prefix or (_DENOISER if made == "UNet2DConditionModel" else "")
    left = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    found = SINGLE_FILE_LOADABLE_CLASSES[made]["checkpoint_mapping_fn"](config=dict(module.config), checkpoint=left)
    if found is not left and 0 < len(left) < len(tensors):
        # Those that take out what they know.
        raise unfit(part.file, f"holds '{min(left)}', which no {made} has", _OTHER_MODEL)
    return dict(found)


def _text_encoder(part: HeldPart, module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a text encoder's tensors by the names of transformers (``create_diffusers_clip_model_from_ldm``)."""
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


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, IndexError):
        return "it has none of its layers"
    said = str(error).splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
