"""Texts of others are shown as text: nothing in them commands a terminal or a page."""

from __future__ import annotations

import html
import sys
import unicodedata

from configs.visible import in_markdown, visible


def test_no_character_that_draws_nothing_commands_a_terminal() -> None:
    """Over all of Unicode: what is left as it is draws something, or joins what does."""
    unseen = [char for char in map(chr, range(sys.maxunicode + 1)) if not char.isprintable()]
    left = [char for char in unseen if visible(char) == char]
    categories = {unicodedata.category(char) for char in left}
    assert not categories & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(char) for char in left} & {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI"}
    assert visible("a \x1b[2J b\r\n", keep="\n") == "a \\x1b[2J b\\r\n"
    assert visible("日本語 é 👩‍🎨") == "日本語 é 👩‍🎨"


def test_markdown_and_html_of_a_prompt_are_shown_as_they_are() -> None:
    text = "# <script>alert(1)</script> [x](javascript:1) $$x$$ :red[y] `z` | a"
    shown = in_markdown(text)
    assert not set("<>[]()`*_#$|:") & set(shown.replace("&#", "").replace(";", ""))
    assert html.unescape(shown) == text
