"""Lists of overrides, and text as the value of one. Every command loads this, so it imports no slow modules."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

#: Characters that YAML must escape, or interprets as line breaks.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def text_override(key: str, value: Any) -> str:
    """Return an override that sets a key to a literal text, or values with texts, which YAML does not interpret."""
    quoted = json.dumps(value, ensure_ascii=False)
    return f"{key}=" + _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


def override_list(overrides: str | Collection[str]) -> list[str]:
    """Return overrides as a list; a text alone is one override."""
    return [overrides] if isinstance(overrides, str) else [*overrides]
