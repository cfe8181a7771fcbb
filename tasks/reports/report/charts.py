"""Charts as inline SVG: searchable text, colors of the page's style sheet, no scripts. Points are (x, y) pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from flowmill.configs.escaping import visible

Line = Sequence[tuple[float, float]]

#: Size of the drawing, and of its margins for labels: left, right, top, bottom. In pixels of a phone's width.
_WIDTH, _HEIGHT = 360, 196
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 26, 34
#: Number of colors of the style sheet, and dashes, which show curves that cover each other.
_COLORS, _DASHES = 7, ("", "6 3", "2 3", "8 3 2 3")
#: Odd: values that are equal but for rounding are in the middle one.
_BINS = 25
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
#: Curves with fewer points have markers.
_MARKED = 40


def lines(title: str, curves: Mapping[str, Line], *, along: str, unit: str = "") -> Markup:
    """Return a chart of curves, with a legend if there are several; points that are not finite are left out.

    Args:
        curves: points by name.
        along: label of the x axis, which counts whole epochs or updates.
        unit: label of the y axis.
    """
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    finite = {name: points for name, points in finite.items() if points}
    axes = _Axes([point for points in finite.values() for point in points], whole=True)
    drawn = Markup()
    for number, points in enumerate(finite.values()):
        places = [axes.place(*point) for point in points]
        color, dash = number % _COLORS, _DASHES[number % len(_DASHES)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn += Markup('<polyline class="c{}" points="{}" stroke-dasharray="{}"/>').format(color, path, dash)
        if len(points) < _MARKED:
            for (x, y), (epoch, value) in zip(places, points, strict=True):
                drawn += Markup(
                    '<circle class="c{}" cx="{:.1f}" cy="{:.1f}" r="2.5"><title>{}</title></circle>'
                ).format(color, x, y, f"{along} {epoch:g}: {value:.4g}")
    ends = "; ".join(
        f"{visible(name)} from {points[0][1]:.3g} to {points[-1][1]:.3g}" for name, points in finite.items()
    )
    return _chart(title, axes, drawn, finite, labels=(along, unit), summary=ends)


def histogram(title: str, values: Mapping[str, np.ndarray], *, along: str) -> Markup:
    """Return histograms over common bins of shares of (N,) values."""
    finite = {name: each[np.isfinite(each)] for name, each in values.items()}
    everything = np.concatenate([*finite.values()])
    edges = np.histogram_bin_edges(
        everything, bins=_BINS, range=_range(everything.min(), everything.max()) if len(everything) else None
    )
    shares = [np.histogram(each, edges)[0] / max(1, len(each)) for each in finite.values()]
    axes = _Axes([(edges[0], 0.0), (edges[-1], float(max(each.max() for each in shares)))])
    drawn = Markup()
    for number, each in enumerate(shares):
        for low, high, share in zip(edges, edges[1:], each, strict=False):
            (left, top), (right, bottom) = axes.place(low, share), axes.place(high, 0.0)
            if share > 0:
                drawn += Markup('<rect class="c{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
                    number % _COLORS, left, top, right - left, bottom - top
                )
    means = "; ".join(f"{visible(name)}: mean {each.mean():.3g}" for name, each in finite.items() if len(each))
    return _chart(title, axes, drawn, finite, labels=(along, "share"), summary=means)


def _range(low: float, high: float, least: float = 0.0) -> tuple[float, float]:
    """Return the ends of a scale; one value, or values equal but for rounding, have a range around them."""
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    around = max(least, abs(low) / 10) or 1.0
    return low - around, high + around


class _Axes:
    """The scales of a chart, and the ticks on them."""

    def __init__(self, points: Line, *, whole: bool = False) -> None:
        xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
        self.across = _Scale(min(xs), max(xs), (_LEFT, _WIDTH - _RIGHT), ticks=6, least=1.0 if whole else 0.0)
        # A margin keeps curves off the frame.
        margin = (max(ys) - min(ys)) * 0.05
        low = min(ys) - (margin if min(ys) else 0.0)
        self.up = _Scale(low, max(ys) + margin, (_HEIGHT - _BOTTOM, _TOP), ticks=6)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a point in the drawing."""
        return self.across.place(x), self.up.place(y)


class _Scale:
    """A linear scale with ticks at 1, 2 or 5 times a power of ten."""

    def __init__(self, low: float, high: float, ends: tuple[int, int], *, ticks: int, least: float = 0.0) -> None:
        low, high = _range(low, high, least)
        self._low, self._high, self._ends = low, high, ends
        raw = (high - low) / ticks
        power = 10.0 ** math.floor(math.log10(raw))
        step = max(least, next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999))
        self._step = step
        self.ticks = [step * n for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        largest = max(map(abs, (low, high)))
        #: Labels are multiples of this power of ten.
        self.power = 0 if 1e-2 <= largest < 1e5 else math.floor(math.log10(largest))

    def place(self, value: float) -> float:
        """Return the place of a value along the axis."""
        start, end = self._ends
        return start + (value - self._low) / (self._high - self._low) * (end - start)

    def labels(self) -> Iterator[tuple[float, str]]:
        """Yield the place of each tick with its label."""
        decimals = max(0, self.power - math.floor(math.log10(self._step) + 1e-9))
        for tick in self.ticks:
            value = tick / 10.0**self.power
            # Adding 0 turns -0 into 0.
            yield self.place(tick), f"{round(value, decimals) + 0.0:,.{decimals}f}"


def _chart(
    title: str, axes: _Axes, drawn: Markup, names: Mapping[str, object], *, labels: tuple[str, str], summary: str
) -> Markup:
    along, unit = labels
    ticks = Markup()
    for y, label in axes.up.labels():
        ticks += Markup('<path class="grid" d="M{} {:.1f}H{}"/><text x="{}" y="{:.1f}" class="end">{}</text>').format(
            _LEFT, y, _WIDTH - _RIGHT, _LEFT - 5, y + 4, label
        )
    for x, label in axes.across.labels():
        ticks += Markup('<path class="grid" d="M{:.1f} {}v4"/><text x="{:.1f}" y="{}" class="mid">{}</text>').format(
            x, _HEIGHT - _BOTTOM, x, _HEIGHT - _BOTTOM + 16, label
        )
    power = f" in 10{str(axes.up.power).translate(_RAISED)}" if axes.up.power else ""
    legend = Markup().join(
        Markup('<span class="c{}">{}</span> ').format(number % _COLORS, visible(name))
        for number, name in enumerate(names)
        if len(names) > 1
    )
    return Markup(
        '<figure class="chart"><figcaption>{title}</figcaption>'
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{summary}">'
        '<text x="0" y="10">{unit}</text>{ticks}{drawn}<text x="{right}" y="{bottom}" class="end">{along}</text>'
        '</svg><p class="legend">{legend}</p></figure>'
    ).format(
        title=visible(title),
        width=_WIDTH,
        height=_HEIGHT,
        summary=f"{visible(title)}: {summary}",
        unit=f"{unit}{power}",
        ticks=ticks,
        drawn=drawn,
        right=_WIDTH - _RIGHT,
        bottom=_HEIGHT - 4,
        along=along,
        legend=legend,
    )
