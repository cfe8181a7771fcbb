"""Text of others as text: what a terminal or a page would obey is made visible instead."""

from __future__ import annotations

import re
import unicodedata

#: Categories of characters that draw nothing and may command: controls, surrogates, line and paragraph separators.
_COMMANDING = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: Formatting characters that turn the direction of what is beside them.
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
#: What Markdown, with its mathematics, colors, links and directives, takes for markup.
_MARKUP = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:&@^=\"'/])")


def visible(text: str, *, keep: str = "") -> str:
    """Return a text with characters that command a terminal, or turn its direction, as escapes like ``\\x1b``.

    Args:
        text: a text, of a prompt say.
        keep: characters that are left as they are, such as line breaks.
    """
    return "".join(each if each in keep or not _commands(each) else _escaped(each) for each in text)


def in_markdown(text: str) -> str:
    """Return a text such that Markdown and HTML show it as it is, in one line."""
    return _MARKUP.sub(lambda found: f"&#{ord(found[1])};", visible(text))


def _commands(character: str) -> bool:
    return not character.isprintable() and (character in _TURNING or unicodedata.category(character) in _COMMANDING)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
