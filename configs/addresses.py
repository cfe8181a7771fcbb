"""Addresses in a config: they are written down with the run, so they hold no password."""

from __future__ import annotations

from urllib.parse import urlsplit


def without_password(address: str | None, *, instead: str) -> str | None:
    """Return an address as it is.

    Args:
        address: a URL.
        instead: where the password belongs.

    Raises:
        ValueError: it holds a password; the message does not.
    """
    if address is not None and "://" in address and urlsplit(address).password is not None:
        raise ValueError(f"holds a password, which would be written down with the run. Take it out; {instead}")
    return address
