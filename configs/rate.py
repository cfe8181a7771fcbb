"""The page on which people compare samples."""

from __future__ import annotations

from pydantic import Field

from flowmill.configs.base import Section


class RateSection(Section):
    """The page on which people compare samples, see ``flowmill rate``, whose options come first."""

    question: str = Field("", max_length=300)
    """Question to raters; empty: the usual one of their task."""
    guidelines: str = Field("", max_length=20_000)
    """Text that raters read first, and can read again."""
