"""Untrusted text as plain text, wherever it is shown: control characters and markup are escaped.

A template that escapes HTML by itself needs ``visible`` alone. Printed text goes through ``flows.console``.
"""

from __future__ import annotations

import re
import shlex
import unicodedata

#: Categories of characters that draw nothing and may command: controls, surrogates, line and paragraph separators.
_COMMANDING = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: Formatting characters that change the direction of neighboring text.
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
#: Patterns that Markdown, with mathematics, colors, links, mentions and directives, takes for markup.
_MARKUP = re.compile(r"^[ #+\-=:]| $|(?<=www)\.|(?<![^\W_])_|_(?![^\W_])|:(?!\s)|[\\`*{}\[\]<>!|~$&@^]", re.IGNORECASE)
_NUMBERED = re.compile(r"^(\d+)([.)])")
#: Addresses, and names of files next to the page, that end where they seem to in a link of Markdown.
_ADDRESS = re.compile(r"https?://[\w.~:/?#@!$&*+,;=%-]+|\w[\w.-]*", re.ASCII)
#: Characters that spreadsheets take for the beginning of a formula, in full width too.
_FORMULA = frozenset("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")

#: Characters that Markdown takes literally after a backslash.
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")


def visible(text: str, *, keep: str = "") -> str:
    """Return a text with characters that command a terminal, or turn its direction, as escapes like ``\\x1b``.

    Args:
        text: a text, of a prompt say.
        keep: characters that are left as they are, such as line breaks.
    """
    if text.isprintable():
        return text
    return "".join(each if each in keep or not _commands(each) else _escaped(each) for each in text)


def in_markdown(text: str) -> str:
    """Return a text such that Markdown and HTML show it as it is, in one line, in a table's cell too."""
    shown = _MARKUP.sub(lambda found: _entity(found[0]), visible(text))
    return _NUMBERED.sub(lambda found: f"{found[1]}{_entity(found[2])}", shown)


def in_code(text: str) -> str:
    """Return a text as code within a line of Markdown, in a table's cell too."""
    if text.strip() == text != "" and text.isprintable() and not {"`", "|"} & {*text}:
        return f"`{text}`"
    return f"<code>{in_markdown(text)}</code>"


def in_link(text: str, address: str) -> str:
    """Return a link of Markdown, or its text alone where the address could lead elsewhere than it seems to."""
    if not _ADDRESS.fullmatch(address):
        return in_markdown(text)
    return f"[{text if text == address else in_markdown(text)}]({address})"


def fenced(text: str, language: str = "") -> str:
    """Return lines of code as a block of Markdown that ends behind them."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def in_cell(value: object) -> object:
    """Return a text for a cell of CSV that spreadsheets do not take for a formula."""
    if not isinstance(value, str):
        return value
    return f"'{visible(value)}" if value[:1] in _FORMULA and value else visible(value)


def in_python(text: str) -> str:
    """Return a text as a string of Python that shows all of itself, double-quoted unless it holds such quotes."""
    if '"' in text:
        # Python's own choose quotes that need no escaping.
        return repr(text)
    escaped = text.replace("\\", "\\\\")
    return f'"{"".join(each if each.isprintable() else _escaped(each) for each in escaped)}"'


def command(*words: object) -> str:
    """Return a command line that a shell takes as these words, so that it can be pasted from where it is shown."""
    return " ".join(map(quoted, words))


def quoted(word: object) -> str:
    """Return a word of a command, such as a path, as a shell takes it."""
    text = str(word)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_in_dollars, text))}'"


def in_markdown_cell(text: str) -> str:
    """Return a text such that a cell of Prefect's tables, which is Markdown without entities, shows it as it is."""
    shown = _PUNCTUATION.sub(r"\\\1", visible(text))
    # Spaces in front would make it code.
    return "\u00a0" * (len(shown) - len(shown.lstrip(" "))) + shown.lstrip(" ")


def _commands(character: str) -> bool:
    return not character.isprintable() and (character in _TURNING or unicodedata.category(character) in _COMMANDING)


def _in_dollars(character: str) -> str:
    """Return a character as the shells' ``$'...'`` has it."""
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def _entity(character: str) -> str:
    return f"&#{ord(character)};"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
