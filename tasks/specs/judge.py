"""Which reward or judge looks at which evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.specs.base_spec import Find
from tasks.specs.graph import OF, Node, shown_of
from tasks.specs.run_inputs import RunInputs
from tasks.specs.score import RewardSpec


class JudgeSpec(RewardSpec):
    """A reward or judge over the samples of an evaluation."""

    name = "judge"

    def __init__(self, facts: RunInputs, epoch: int, slot: str, find: Find) -> None:
        """Bind to a reward or judge of the config, and to the run's evaluation or, after an @, one of its own name.

        Raises:
            ConfigError: the config has no such reward or judge.
        """
        super().__init__(facts, epoch, slot, find)
        reward, _, self.evaluation = slot.partition(OF)
        self.section = facts.reward_section(reward, judges=True)

    def options(self) -> Mapping[str, Any]:
        """The reward, and how many images its grid shows."""
        return {**super().options(), "images": self.config.evaluate.images}

    def upstream(self) -> tuple[Node, ...]:
        """The evaluation, or what was drawn of it."""
        return (shown_of(self.config, self.section, self.epoch, self.evaluation),)
