"""Escapes control characters and markup in untrusted text for display.

Templates that escape HTML themselves need only ``visible``. Printed text goes through ``flowmill.flows.console``.
"""

from __future__ import annotations

import re
import shlex
import unicodedata

#: Categories of invisible characters that may control a terminal: controls, surrogates, line and paragraph separators.
_COMMANDING = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: Formatting characters that change the direction of neighboring text.
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
#: Patterns that Markdown interprets as markup, including mathematics, colors, links, mentions and directives.
_MARKUP = re.compile(r"^[ #+\-=:]| $|(?<=www)\.|(?<![^\W_])_|_(?![^\W_])|:(?!\s)|[\\`*{}\[\]<>!|~$&@^]", re.IGNORECASE)
_NUMBERED = re.compile(r"^(\d+)([.)])")
#: Addresses and relative file names that are safe as the target of a Markdown link.
_ADDRESS = re.compile(r"https?://[\w.~:/?#@!$&*+,;=%-]+|\w[\w.-]*", re.ASCII)
#: Characters that start a formula in spreadsheets, including their full-width forms.
_FORMULA = frozenset("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def visible(text: str, *, keep: str = "") -> str:
    """Return a text with terminal control and direction-changing characters replaced by escapes like ``\\x1b``.

    Args:
        text: a text, such as a prompt.
        keep: characters that are not replaced, such as line breaks.
    """
    if text.isprintable():
        return text
    return "".join(each if each in keep or not _commands(each) else _escaped(each) for each in text)


def in_markdown(text: str) -> str:
    """Return a text that Markdown and HTML show literally, on one line and in table cells."""
    shown = _MARKUP.sub(lambda match: _entity(match[0]), visible(text))
    return _NUMBERED.sub(lambda match: f"{match[1]}{_entity(match[2])}", shown)


def in_code(text: str) -> str:
    """Return a text as inline code of Markdown, also valid in a table cell."""
    if text.strip() == text != "" and text.isprintable() and not {"`", "|"} & {*text}:
        return f"`{text}`"
    return f"<code>{in_markdown(text)}</code>"


def in_link(text: str, address: str) -> str:
    """Return a Markdown link, or only its text if the address is not safe as a link target."""
    if not _ADDRESS.fullmatch(address):
        return in_markdown(text)
    return f"[{text if text == address else in_markdown(text)}]({address})"


def fenced(text: str, language: str = "") -> str:
    """Return code as a fenced Markdown block; the fence is longer than any in the code."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def in_cell(value: object) -> object:
    """Return a text for a CSV cell that spreadsheets do not interpret as a formula."""
    if not isinstance(value, str):
        return value
    return f"'{visible(value)}" if value[:1] in _FORMULA and value else visible(value)


def in_python(text: str) -> str:
    """Return a text as a printable Python string literal, double-quoted unless it contains double quotes."""
    if '"' in text:
        # repr chooses quotes that need no escaping.
        return repr(text)
    escaped = text.replace("\\", "\\\\")
    return f'"{"".join(each if each.isprintable() else _escaped(each) for each in escaped)}"'


def command(*words: object) -> str:
    """Return a shell command line of these words, quoted for copy and paste."""
    return " ".join(map(quoted, words))


def quoted(word: object) -> str:
    """Return a word of a command, such as a path, quoted for the shell."""
    text = str(word)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_in_dollars, text))}'"


def _commands(character: str) -> bool:
    return not character.isprintable() and (character in _TURNING or unicodedata.category(character) in _COMMANDING)


def _in_dollars(character: str) -> str:
    """Return a character escaped for the shell's ``$'...'``."""
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def _entity(character: str) -> str:
    return f"&#{ord(character)};"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
