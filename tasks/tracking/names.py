"""Names and texts that MLflow accepts: long ones are shortened, and characters that MLflow refuses are replaced.

A changed name ends with a digest of the original name, so that different names stay different. The limits are those of
``mlflow.utils.validation`` and of MLflow's database columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowmill.configs.fingerprint import hash_text

#: Hexadecimal digits of the digest at the end of a changed name.
_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRule:
    """MLflow's rule for names of one kind."""

    limit: int
    refused: re.Pattern[str]
    """A character that the name may not contain."""
    is_path: bool = False
    """Whether it must be a normalized relative path that does not lead up."""


_KEY = NameRule(limit=250, refused=re.compile(r"[^/\w.\- :]"), is_path=True)
_FREE = re.compile(r"[\x00-\x1f\x7f]")
#: For files: ASCII, as file systems limit bytes, without characters that MLflow parses in picture names and URLs.
_FILE = re.compile(r"[^\w.\-~ :]", re.ASCII)
RULES = {
    "metric": _KEY,
    "param": _KEY,
    "tag": _KEY,
    "run": NameRule(limit=250, refused=_FREE),
    "experiment": NameRule(limit=250, refused=_FREE),
    "dataset": NameRule(limit=500, refused=_FREE),
    "logged model": NameRule(limit=250, refused=re.compile(r"""[/:.%"'\x00-\x1f\x7f]""")),
    "registered model": NameRule(limit=250, refused=re.compile(r"""[/:"'\\\x00-\x1f\x7f]"""), is_path=True),
    "file": NameRule(limit=100, refused=_FILE, is_path=True),
    "folder": NameRule(limit=120, refused=re.compile(rf"(?!/){_FILE.pattern}", re.ASCII), is_path=True),
    # Stored as JSON, 200 entries per tag.
    "entry": NameRule(limit=20, refused=re.compile(r"[^!#-\[\]-~]")),
}
#: Most characters of a tag's value, and of a description.
_LONGEST_TEXT = 5000


def mlflow_name(kind: str, name: str) -> str:
    """Return a name that MLflow accepts, unchanged if possible.

    Args:
        kind: kind of name, a key of ``RULES``.
    """
    rule = RULES[kind]
    accepted = rule.refused.sub("-", name)
    if rule.is_path:
        accepted = "/".join(each for each in accepted.split("/") if each not in ("", ".", ".."))
        # MLflow treats every name that begins with '..' as a path that leads up.
        accepted = accepted.lstrip(".") if accepted.startswith("..") else accepted
    if accepted == name and name.strip() and len(name) <= rule.limit:
        return name
    return f"{accepted[: rule.limit - _DIGITS - 1].rstrip(' /')}-{hash_text(name)[:_DIGITS]}"


def epoch_digits(epoch: int) -> str:
    """Return an epoch as digits of one width, so that names that contain it sort by epoch."""
    return f"{epoch:05d}"


def mlflow_text(text: str) -> str:
    """Return a text for people, cut to the length that MLflow accepts."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
