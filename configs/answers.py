"""What a server's answer says, read as UTF-8 alone.

A header names the charset of an answer, and Python has codecs that are none of text, or take minutes for a megabyte.
"""

from __future__ import annotations

import json
from typing import Any

#: What clients of HTTP are told an answer's encoding is.
ENCODING = "utf-8"


def text_of(content: bytes) -> str:
    """Return the text of an answer; bytes that are no UTF-8 are replaced."""
    return content.decode(ENCODING, errors="replace")


def json_of(content: bytes) -> Any:
    """Return the value of an answer in JSON.

    Raises:
        ValueError: it is no JSON in UTF-8.
    """
    try:
        return json.loads(content.decode(ENCODING))
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def read_as_utf8(response: Any) -> None:
    """Have a response of httpx decode its text as UTF-8, for libraries that ask for it: a hook of a client."""
    response.encoding = ENCODING
