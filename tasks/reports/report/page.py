"""The report as one self-contained HTML file, which fetches no resources.

Its style sheet and its only script are files of this folder. The browser runs no other script: the page names the hash
of this one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flowmill.configs.escaping import visible
from flowmill.configs.human_units import duration, size
from flowmill.configs.load import unlike
from flowmill.tasks.reports.report.content import RunReport
from flowmill.tasks.reports.report.run_charts import compared, progress, sections_of

#: The parts of a text that are compared: words, punctuation marks, spaces.
_PARTS = re.compile(r"\w+|\s+|[^\w\s]")


def page(runs: Sequence[RunReport], *, price: float | None = None) -> str:
    """Return the HTML of a report of one or several runs.

    Args:
        price: price of an hour of work, to show the cost of a run.
    """
    environment = Environment(
        loader=PackageLoader("flowmill.tasks.reports.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"url": data_url, "bytes": size, "duration": duration}
    script, style = (
        (files("flowmill.tasks.reports.report") / name).read_text("utf-8") for name in ("report.js", "report.css")
    )
    return environment.get_template("report.html").render(
        runs=runs,
        title=" and ".join(run.name for run in runs),
        price=price,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(style),
        differing=_differing(runs),
        compared=list(compared(runs)),
        charts={run.name: sections_of(run) for run in runs},
        progress={run.name: progress(run) for run in runs},
        marked=_marked,
    )


def _differing(runs: Sequence[RunReport]) -> list[tuple[str, list[Any]]]:
    settings = unlike(*(run.settings for run in runs), missing="")
    return [(key, list(values)) for key, values in settings.items() if key != "run.name"]


def _marked(before: str, after: str) -> tuple[Markup, Markup]:
    """Return two texts with the words that only one of them has marked as ``del`` and ``ins``."""
    old, new = (_PARTS.findall(_shown(text)) for text in (before, after))
    one, other = Markup(), Markup()
    for kind, a, b, c, d in SequenceMatcher(None, old, new).get_opcodes():
        left, right = "".join(old[a:b]), "".join(new[c:d])
        one += left if kind == "equal" or not left else Markup("<del>{}</del>").format(left)
        other += right if kind == "equal" or not right else Markup("<ins>{}</ins>").format(right)
    return one, other


def _shown(value: Any) -> Any:
    """Return a value with control characters made visible; Jinja escapes only HTML."""
    return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def data_url(data: bytes) -> str:
    """Return a PNG, a WebP or an mp4 as a data URL."""
    kind = "image/png" if data[1:4] == b"PNG" else "image/webp" if data[8:12] == b"WEBP" else "video/mp4"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
