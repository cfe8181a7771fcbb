"""Imports large libraries only when needed, silences their notices, and reads third-party JSON files."""

from __future__ import annotations

import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

#: Loggers with notices on the import of torchao and bitsandbytes, on kernels for other hardware and registrations
#: with torch. diffusers and peft import them if they are installed.
_IMPORTING_QUANTIZERS = (
    "torchao torchao.kernel.intmm torch.utils._pytree diffusers.quantizers.torchao.torchao_quantizer "
    "bitsandbytes.backends.cpu.ops"
).split()
#: Limits of JSON files: the longest weight indices have a tenth of these bytes, configs four levels.
_MOST_BYTES = 1 << 26
_MOST_DEPTH = 64
#: Fields whose default is infinite, in transformers' classes like Mamba 2 and in diffusers' DPM schedulers.
_UNBOUNDED = frozenset({"time_step_limit", "lambda_min_clipped"})


def diffusers_class(name: str) -> Any:
    """Return a class of diffusers, imported now; raise AttributeError if diffusers has no such class."""
    import diffusers

    return getattr(diffusers, name)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a third-party JSON file, such as a component's config or a weight index. Raises OSError if
    there is no such file; ValueError if it is no JSON, no object, too large, nested too deeply, or has a number that is
    not finite."""
    try:
        # Reading a pipe would block, and reading a device never end.
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            _check_values(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is no JSON that can be read ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"'{path}' is no JSON object")
    return content


def read_weight_index(path: Path) -> dict[str, str]:
    """Return the file of each weight by its name, from an index such as ``model.safetensors.index.json``. Raises
    OSError if there is no such file; ValueError if it cannot be read, see ``read_json``, or lists something else than
    files next to it."""
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"'{path}' has no weight_map")
    for name, file in listed.items():
        # A file of another folder would be trained, and is not covered by this folder's checksums.
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"'{path}' says of '{name}' {file!r}, not the name of a file next to it")
    return listed


def same(value: Any, other: Any) -> bool:
    """Return whether two values of settings are equal; True and 1 are not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _check_values(content: Any) -> None:
    """Check that a parsed value is not nested deeply, and that all its numbers are finite."""
    level: list[tuple[str, Any]] = [("", content)]
    for _ in range(_MOST_DEPTH):
        inner: list[tuple[str, Any]] = []
        for name, value in level:
            if isinstance(value, dict):
                inner.extend(value.items())
            elif isinstance(value, list):
                inner.extend((name, each) for each in value)
            elif isinstance(value, float | int) and not _is_finite(value, name in _UNBOUNDED):
                raise ValueError(f"{name!r} has a number that is not finite")
        if not inner:
            return
        level = inner
    raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")


def _is_finite(value: float, infinite: bool) -> bool:
    """Return whether a number is finite as a float, or at least a number where it may be infinite."""
    try:
        return not math.isnan(value) if infinite else math.isfinite(value)
    except OverflowError:
        return False


def quiet_libraries() -> None:
    """Turn off the progress bars of diffusers and transformers, and everything below an error."""
    import diffusers

    _silence(diffusers)
    quiet_transformers()
    # An autoencoder of diffusers uses it.
    warnings.filterwarnings("ignore", message=".*weight_norm. is deprecated", category=FutureWarning)


def quiet_transformers() -> None:
    """Do that for transformers alone: language models do not need diffusers, whose import takes a second."""
    import transformers

    _silence(transformers)


def _silence(library: Any) -> None:
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()


def quiet_imports() -> None:
    """Silence notices of missing features on the import of optional packages."""
    for name in _IMPORTING_QUANTIZERS:
        # A filter stays, whereas torch resets the levels of its loggers.
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
