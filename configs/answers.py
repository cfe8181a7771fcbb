"""Decodes HTTP responses as UTF-8, ignoring the charset in their headers.

Some of Python's codecs decode no text, or take minutes for a megabyte.
"""

from __future__ import annotations

import json
from typing import Any

#: Encoding of every response.
ENCODING = "utf-8"


def text_of(content: bytes) -> str:
    """Return the text of a response; invalid UTF-8 is replaced."""
    return content.decode(ENCODING, errors="replace")


def json_of(content: bytes) -> Any:
    """Return the value of a JSON response.

    Raises:
        ValueError: the response is not JSON in UTF-8.
    """
    try:
        return json.loads(content.decode(ENCODING))
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def read_as_utf8(response: Any) -> None:
    """Make an httpx response decode its text as UTF-8; an event hook for clients."""
    response.encoding = ENCODING
