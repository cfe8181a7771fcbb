"""Names and texts as MLflow takes them: one function shortens what is too long and replaces characters MLflow refuses.

A name that had to change ends with a digest of the whole name, so that two names never become one. Limits are those of
``mlflow.utils.validation`` and of the columns of its database.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from configs.fingerprint import hash_text

#: Hexadecimal digits of the digest at the end of a name that had to change.
_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What MLflow takes as a name of one kind."""

    limit: int
    """Characters."""
    refused: re.Pattern[str]
    """A character that it may not have."""
    is_path: bool = False
    """It must be a path below where it is, in its shortest form."""


_KEY = Rule(limit=250, refused=re.compile(r"[^/\w.\- :]"), is_path=True)
_FREE = re.compile(r"[\x00-\x1f\x7f]")
#: Of files: ASCII, as file systems limit bytes, and without what MLflow reads in names of pictures and in addresses.
_FILE = re.compile(r"[^\w.\-~ :]", re.ASCII)
RULES = {
    "metric": _KEY,
    "param": _KEY,
    "tag": _KEY,
    "run": Rule(limit=250, refused=_FREE),
    "experiment": Rule(limit=250, refused=_FREE),
    "dataset": Rule(limit=500, refused=_FREE),
    "logged model": Rule(limit=250, refused=re.compile(r"""[/:.%"'\x00-\x1f\x7f]""")),
    "registered model": Rule(limit=250, refused=re.compile(r"""[/:"'\\\x00-\x1f\x7f]"""), is_path=True),
    "file": Rule(limit=100, refused=_FILE, is_path=True),
    "folder": Rule(limit=120, refused=re.compile(rf"(?!/){_FILE.pattern}", re.ASCII), is_path=True),
    # In JSON, which a tag holds 200 of.
    "entry": Rule(limit=20, refused=re.compile(r"[^!#-\[\]-~]")),
}
#: Characters of the value of a tag, and of a description.
_LONGEST_TEXT = 5000


def mlflow_name(kind: str, name: str) -> str:
    """Return a name as MLflow takes it: as it is where that is possible.

    Args:
        kind: of what, a key of ``RULES``.
        name: the name.
    """
    rule = RULES[kind]
    kept = rule.refused.sub("-", name)
    if rule.is_path:
        kept = "/".join(each for each in kept.split("/") if each not in ("", ".", ".."))
        # MLflow takes every name that begins so for one that leads up.
        kept = kept.lstrip(".") if kept.startswith("..") else kept
    if kept == name and name.strip() and len(name) <= rule.limit:
        return name
    return f"{kept[: rule.limit - _DIGITS - 1].rstrip(' /')}-{hash_text(name)[:_DIGITS]}"


def mlflow_text(text: str) -> str:
    """Return a text for people as MLflow takes it: cut where it is too long."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
