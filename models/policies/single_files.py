"""Pipeline folders from single files in the layout of a model's authors, as diffusers' ``from_single_file`` loads
them; configs and all other files come from a folder.

A file with names of an autoencoder holds a pipeline; any other holds a denoiser. Tensors are views of their file, so
checks read few of them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.folders import files_below
from flowmill.configs.user_directories import user_path
from flowmill.models.library_loading import read_json
from flowmill.models.policies.pipeline_index import in_folder, index_file, portable_index
from flowmill.models.weights.stored_weights import weight_files

#: Suffixes of component files to copy: no pickles and no notes.
_READ = (".json", ".safetensors", ".txt", ".model", ".jinja")
#: Prefixes of an autoencoder's names, by which a file of a pipeline is recognized.
_AUTOENCODER = ("first_stage_model.", "vae.")
#: Names that no component takes: schedulers' tables, averages of training, positions, scales, statistics.
_UNUSED = re.compile(
    r"((sqrt_|log_)?(one_minus_|recip_|recipm1_)?alphas_cumprod(_prev)?|betas|posterior_\w+|logvar|denoiser\.sigmas"
    r"|scale_factor|model_ema\..+|.+\.position_ids|.+\.logit_scale|(.+\.)?norm_final\.weight"
    r"|(.+\.)?per_channel_statistics\..+)"
)
#: The projection of a CLIP-L that Stable Diffusion 3 does not project; diffusers makes an identity.
_PROJECTION = "text_encoders.clip_l.transformer.text_projection.weight"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OTHER_MODEL = "Give a file of the model that model.path is, or the path of the model that this file is of"
_SOME = "Say which of its components to take: model.single_file={COMPONENT: FILE}"
_FOLDER = "Give a pipeline folder that holds these weights as model.path, and no file"


def unfit(path: Path, reason: str, remedy: str) -> ConfigError:
    """Return the error for a file that cannot be a base model, with the reason and the remedy."""
    return ConfigError(f"model.single_file: '{path}' {reason}, so no run can start from it. {remedy}.")


def components_in(files: Mapping[str, str], denoiser: str) -> frozenset[str]:
    """Return the components that files certainly hold; raise ConfigError if a file is missing, pickled or unreadable.
    ``files``: paths by the component to use; under '' a file of which all components are used."""
    stored = {component: _stored(user_path(path), component) for component, path in files.items()}
    autoencoder = {"vae"} if _is_pipeline(stored.get("", {})) else set()
    return frozenset({component or denoiser for component in stored} | autoencoder)


def load_components(
    files: Mapping[str, str], folder: Path, index: Mapping[str, Any], denoisers: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the components that files hold of a folder's pipeline, by name, with weights that lie in the files.

    Raises ConfigError if the files hold another model, or a component is neither in the files nor in the folder.
    """
    # Another denoiser is the most helpful message.
    models = sorted((name for name in index if _is_model(folder, index, name)), key=lambda name: name not in denoisers)
    trained = [name for name in denoisers if name in models]
    if "" in files and len(trained) > 1:
        both = ", ".join(f"{name}: FILE" for name in trained)
        reason = f"holds one denoiser, and model.path has {' and '.join(trained)}"
        raise unfit(Path(files[""]), reason, f"Say which one: model.single_file={{{both}}}")
    loaded = list[str]()
    with TemporaryDirectory() as configs:
        # diffusers loads the components that a file lacks from a folder that has them.
        _copy(folder, Path(configs), (".json",))
        for component, path in files.items():
            file = user_path(path)
            tensors, taken = _stored(file, component), 0
            whole = _is_pipeline(tensors)
            for name in models if whole and not component else [component or denoisers[0]]:
                if name not in models:
                    raise unfit(file, f"is for {name}, which model.path '{folder}' lacks", "Give a file of this model")
                module = _component(file, tensors, Path(configs), name, index[name])
                if module is not None:
                    loaded.append(name)
                    taken += _values(module, tensors)
                    yield name, module
                elif component or not whole:
                    raise unfit(file, f"holds no {index[name][1]}, or diffusers converts none", _FOLDER)
            if not (component and whole):
                _check_all_used(file, tensors, taken)
    for name in models:
        if name not in loaded:
            _check_weights(folder, name, loaded)


def write_folder(
    files: Mapping[str, str], folder: Path, index: Mapping[str, Any], denoisers: Sequence[str], target: Path
) -> None:
    """Write a pipeline folder: components from files, all other files from another folder. The other folder's card and
    licenses are not copied: they describe other weights. ``target``: folder to write; must not exist."""
    target.mkdir(parents=True)
    path = index_file(folder)
    written = json.dumps(portable_index(read_json(path), in_folder(folder)), indent=2, sort_keys=True)
    (target / path.name).write_text(f"{written}\n")
    for name, module in load_components(files, folder, index, denoisers):
        module.save_pretrained(target / name)
        # Libraries add notes about the process to the config, so the original files replace it.
        for config in (folder / name).glob("*.json"):
            if not config.name.endswith(".index.json"):
                shutil.copy(config, target / name)
    for name in index:
        if _is_listed(index, name) and (folder / name).is_dir() and not (target / name).exists():
            _copy(folder / name, target / name)


def _stored(file: Path, component: str) -> dict[str, Tensor]:
    """Return the tensors of a file by name, as views of the file, for one component without rounded ones, which may be
    of another; raise ConfigError if it cannot be read, or all are used and some are rounded."""
    if file.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        remedy = "Convert it where you trust it: safetensors.torch.save_file(torch.load(FILE)['state_dict'], NEW_FILE)"
        raise unfit(file, "is pickled and can run any code when it is loaded, which flowmill never does", remedy)
    if not file.is_file() or file.suffix != ".safetensors":
        raise unfit(file, "is no safetensors file", "Paths are relative to the config file")
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise unfit(file, f"cannot be read ({error})", "Copy or download it again") from None
    for name, tensor in tensors.items():
        if not tensor.shape and not _UNUSED.fullmatch(name):
            raise unfit(file, f"has '{name}' of shape (), where weights have a dimension or more", _OTHER_MODEL)
    rounded = {name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.dtype not in _FLOATS}
    if rounded and not component:
        reason = f"has '{min(rounded)}' as {tensors[min(rounded)].dtype}, which is rounded for speed"
        raise unfit(file, reason, f"Give one that is not. {_SOME}")
    return {name: tensor for name, tensor in tensors.items() if name not in rounded}


def _component(
    file: Path, tensors: Mapping[str, Tensor], configs: Path, name: str, entry: Sequence[str]
) -> torch.nn.Module | None:
    """Return a component whose weights are all in a file; None if diffusers finds none there, or reads no such class.

    Raises ConfigError if it is another model: tensors are missing, or of other shapes.
    """
    from diffusers import pipelines
    from diffusers.loaders.single_file import SingleFileComponentError, load_single_file_sub_model

    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} or {torch.float32}
    dtype = reduce(torch.promote_types, dtypes)
    try:
        module = load_single_file_sub_model(
            *entry, name, dict(tensors), pipelines, False, str(configs), local_files_only=True, torch_dtype=dtype
        )
    except SingleFileComponentError:
        return None
    except (AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise unfit(file, f"is no {entry[1]} as {name} ({_first_line(error)})", _OTHER_MODEL) from None
    if entry[0] == "transformers":
        module.tie_weights()
    missing = next((key for key, tensor in module.state_dict().items() if tensor.is_meta), None)
    if missing is not None:
        raise unfit(file, f"has nothing for '{name}.{missing}' of a {entry[1]}", _OTHER_MODEL)
    return module


def _values(module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> int:
    """Return the number of values that a component has from a file; tied ones count once."""
    state = {tensor.data_ptr(): (name, tensor) for name, tensor in module.state_dict().items()}
    filled = set() if _PROJECTION in tensors else {"text_projection.weight"}
    return sum(
        tensor.numel()
        for name, tensor in state.values()
        if name not in filled or not torch.equal(tensor, torch.eye(len(tensor), dtype=tensor.dtype))
    )


def _check_all_used(file: Path, tensors: Mapping[str, Tensor], taken: int) -> None:
    """Check that components take as many values as a file has: converters split, join and move them, and only warn of
    tensors that they leave out."""
    has = sum(tensor.numel() for name, tensor in tensors.items() if not _UNUSED.fullmatch(name))
    if has > taken:
        raise unfit(file, f"has {has} values, of which its components take {taken}", f"{_OTHER_MODEL}. {_SOME}")


def _check_weights(folder: Path, name: str, loaded: Collection[str]) -> None:
    try:
        weight_files(folder / name)
    except ConfigError:
        raise ConfigError(
            f"model.path '{folder}' has no weights of {name} as safetensors, and model.single_file holds only "
            f"{', '.join(loaded)}. Give a folder or hub id with them, or one file for each: "
            "model.single_file={COMPONENT: FILE}."
        ) from None


def _is_pipeline(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a file has an autoencoder, so that it holds a whole pipeline."""
    return any(name.startswith(_AUTOENCODER) for name in tensors)


def _is_listed(index: Mapping[str, Any], name: str) -> bool:
    entry = index.get(name)
    return isinstance(entry, list) and entry[0] is not None


def _is_model(folder: Path, index: Mapping[str, Any], name: str) -> bool:
    of_library = _is_listed(index, name) and index[name][0] in ("diffusers", "transformers")
    return of_library and (folder / name / "config.json").is_file()


def _copy(source: Path, target: Path, suffixes: Collection[str] = _READ) -> None:
    for name in files_below(source):
        if (source / name).suffix in suffixes:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, NotImplementedError):
        # torch, when diffusers moves weights that nothing was loaded to.
        return "it lacks weights"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0].partition(' If you want')[0]}" if lines else type(error).__name__
