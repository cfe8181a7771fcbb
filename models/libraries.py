"""Keeps diffusers and transformers from writing progress bars and notices into our own output."""

from __future__ import annotations


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars and everything below an error."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
