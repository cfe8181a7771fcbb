"""What the publications state for every full-size preset; the page of presets shows the differences.

Settings are grouped by the file that states them; later groups overrule earlier ones. Values are in the units of a
config: epochs where a source counts epochs, optimizer updates for moving averages (four epochs of two updates are 8),
guidance with 1 as off. A setting that no config has (yet) is listed too: the head of the preset says what is done.
"""

from __future__ import annotations

from collections.abc import Mapping

from tools.published import (
    enhancers,
    flow_factory,
    flow_grpo,
    forward,
    further,
    given,
    language,
    matching,
    ratios,
    recent,
)
from tools.published.publication import Publication

_SOURCES = (flow_grpo, flow_factory, further, enhancers, given, language, forward, recent, matching, ratios)
PUBLISHED: Mapping[str, Publication] = dict(
    sorted((name, found) for source in _SOURCES for name, found in source.PUBLISHED.items())
)
