"""Formats bytes and seconds for people."""

from __future__ import annotations


def size(count: float | None) -> str:
    """Return a number of bytes as readable text."""
    if count is None:
        return "unknown until the model is here"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Return a number of seconds as readable text."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    if seconds < 2 * 86400:
        return "{} h {} min".format(*divmod(round(seconds / 60), 60))
    return "{} d {} h".format(*divmod(round(seconds / 3600), 24))
