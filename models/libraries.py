"""The large libraries: imported where a model is loaded, and kept from writing notices into our own output."""

from __future__ import annotations

from typing import Any


def diffusers_class(name: str) -> Any:
    """Return a class of diffusers, imported now.

    Raises:
        AttributeError: diffusers has no such class.
    """
    import diffusers

    return getattr(diffusers, name)


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars and everything below an error."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
