"""Charts as SVG, drawn by matplotlib: no scripts, searchable text, and the full width of the page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.escaping import visible

Line = Sequence[tuple[float, float]]

_SIZE = (5.6, 3.0)
#: Distinguishable with color blindness (Okabe and Ito 2008), and by their dashes in print.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_BINS = 24
#: Most lines of a readable legend.
_NAMED = 8
#: Texts stay texts: they are searchable, and dollar signs in curve names do not start formulas.
_AS_TEXT: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "flowmill"}
_FIXED = re.compile(r'(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"')


@mpl.rc_context(_AS_TEXT)
def lines(title: str, curves: Mapping[str, Line], *, along: str) -> str:
    """Return a chart of curves as SVG; ``along`` labels the x axis."""
    figure, axes = _new(title, along)
    for number, (label, points) in enumerate(curves.items()):
        color, dash = _COLORS[number % len(_COLORS)], _DASHES[number // len(_COLORS) % len(_DASHES)]
        marker = "o" if len(points) < 12 else None
        axes.plot(
            *zip(*points, strict=True),
            dash,
            color=color,
            label=_label(label),
            linewidth=1.4,
            marker=marker,
            markersize=3,
        )
    if any(curves) and len(curves) <= _NAMED:
        axes.legend(fontsize=7, frameon=False)
    return _svg(figure)


@mpl.rc_context(_AS_TEXT)
def histogram(title: str, values: Mapping[str, np.ndarray], *, along: str) -> str:
    """Return histograms over common bins of shares of (N,) values, as SVG."""
    figure, axes = _new(title, along)
    everything = np.concatenate([*values.values()])
    edges = np.histogram_bin_edges(everything, bins=_BINS).tolist()
    for number, (label, each) in enumerate(values.items()):
        weights = np.full(len(each), 1 / max(1, len(each)))
        axes.hist(each, edges, weights=weights, alpha=0.55, label=_label(label), color=_COLORS[number % len(_COLORS)])
    axes.set_ylabel("share", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    return _svg(figure)


def _new(title: str, along: str) -> tuple[Figure, Axes]:
    # Not pyplot: its figures stay in memory until they are closed.
    figure = Figure(figsize=_SIZE)
    # Fixed margins fit the longest labels: measuring labels takes as long as drawing them.
    figure.subplots_adjust(left=0.15, right=0.98, top=0.87, bottom=0.15)
    axes = figure.add_subplot()
    axes.set_title(visible(title), fontsize=9, loc="left")
    axes.set_xlabel(along, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.yaxis.get_offset_text().set_fontsize(7)
    axes.grid(visible=True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _label(text: str) -> str:
    """Return a legend label: matplotlib leaves out labels that begin with an underscore."""
    return visible(f" {text}" if text.startswith("_") else text)


def _svg(figure: Figure) -> str:
    written = io.StringIO()
    with warnings.catch_warnings():
        # The browser of the reader supplies the fonts.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(written, format="svg", metadata={"Date": None})
    inside = written.getvalue()
    # The page sets the width.
    return re.sub(
        r'(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"', r"\1\2", inside[inside.index("<svg") :], count=1
    )
