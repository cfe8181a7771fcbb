"""Pages and tables of the docs that are rendered from code while the site is built.

mkdocs calls this file as a hook (``python -m mkdocs build``). A page is a template in ``pages/templates``. A marker
``<!-- built: NAME -->``, there or in a page of ``docs/``, is replaced by the rendering of that name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import alert_table, command_page, config_page, preset_page, schema_page

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

DOCS = Path(__file__).parent.parent / "docs"
_TEMPLATES = Path(__file__).parent / "templates"
_MARKER = re.compile(r"<!-- built: (\w+) -->")
#: Returns the text of a marker, by its name.
RENDERERS: Mapping[str, Callable[[], str]] = {
    "alerts": alert_table.render,
    "catalog": preset_page.catalog,
    "commands": command_page.render,
    "configuration": config_page.render,
    "schemas": schema_page.render,
    "sources": preset_page.sources,
}


def pages() -> dict[str, Path]:
    """Return every page of the site, with the file that it is written in: a page of ``docs/`` or a template."""
    files = [*DOCS.glob("*.md"), *_TEMPLATES.glob("*.md")]
    return {path.name: path for path in sorted(files, key=lambda path: path.name)}


@cache
def text(name: str) -> str:
    """Return the Markdown of a page, with its markers replaced."""
    return filled(pages()[name].read_text(encoding="utf-8"))


def filled(markdown: str) -> str:
    """Return a text with its markers replaced."""
    return _MARKER.sub(lambda match: RENDERERS[match[1]]().rstrip(), markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are rendered whole to those in ``docs/``."""
    from mkdocs.structure.files import File

    for name, path in pages().items():
        if path.parent == _TEMPLATES:
            files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **page: Any) -> str:
    """Replace the markers of a page."""
    return filled(markdown)
