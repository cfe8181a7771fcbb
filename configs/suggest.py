"""The nearest valid name, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``Did you mean 'x'? Valid: ...`` for an unknown name."""
    names = sorted(valid)
    near = get_close_matches(name, names, n=2, cutoff=0.5)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return f"{hint}Valid: {', '.join(names)}."
