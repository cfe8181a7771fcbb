"""Text of a command line as an override that means just this text. Nothing that every command waits for is imported."""

from __future__ import annotations

import json
import re

#: Characters that YAML cannot hold as they are, or takes for the end of a line.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def text_override(key: str, text: str) -> str:
    """Return the override that sets a key to a text as it is, whatever YAML would take it for."""
    quoted = json.dumps(text, ensure_ascii=False)
    return f"{key}=" + _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
