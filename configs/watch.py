"""Actions on alerts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.base import Section


class WatchSection(Section):
    """Actions on alerts, which are computed from committed artifacts."""

    on: dict[str, Literal["warn", "stop", "back"]] = Field(default_factory=dict)
    """Action by rule: warn (default); stop, which ends the run before its next stage; back, which continues from the
    best policy before, at a smaller learning rate, as a branch of the run."""
    rate: float = Field(0.1, gt=0, lt=1)
    """Factor of `optimize.learning_rate` with every step back."""

    def rules(self, action: str) -> list[str]:
        """Return the names of the rules with an action, sorted."""
        return sorted(rule for rule, chosen in self.on.items() if chosen == action)
