"""The snippet of a card, which loads the folder that it lies in, or the repository that it is published in."""

from __future__ import annotations

from flowmill.tasks.export.publish import HERE, for_hub


def assert_repository(card: str) -> None:
    """Assert that a card's snippet names its folder once, and that of a published card the repository instead."""
    assert card.count(HERE) == card.count('"."') == 1
    published = for_hub(card, "ann/signs")
    assert 'folder = "ann/signs"\n' in published
    assert '"."' not in published
