"""The large libraries: imported where a model is loaded, and kept from writing notices into our own output."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

#: Loggers that tell, when torchao is imported, of kernels for other hardware and of what it registers with torch.
#: diffusers imports it wherever it is installed.
_IMPORTING_TORCHAO = (
    "torchao",
    "torchao.kernel.intmm",
    "torch.utils._pytree",
    "diffusers.quantizers.torchao.torchao_quantizer",
)


def diffusers_class(name: str) -> Any:
    """Return a class of diffusers, imported now.

    Raises:
        AttributeError: diffusers has no such class.
    """
    import diffusers

    return getattr(diffusers, name)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, such as a component's config.

    Raises:
        OSError: there is no such file.
        ValueError: it is no JSON, or no object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{path}' is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"'{path}' is no JSON object")
    return found


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars and everything below an error."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    # Of an autoencoder that diffusers makes with it.
    warnings.filterwarnings("ignore", message=".*weight_norm. is deprecated", category=FutureWarning)


def quiet_imports() -> None:
    """Keep packages that come with an extra from telling on import what they do without."""
    for name in _IMPORTING_TORCHAO:
        # A filter stays; torch sets its loggers' levels anew.
        logging.getLogger(name).addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
