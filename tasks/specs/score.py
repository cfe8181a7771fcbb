"""Which reward is scored, on what; a judge is one over an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.fingerprint import canonical_json
from configs.rewards import RewardSection
from tasks.inputs.option_paths import Place, reward_places
from tasks.specs.base_spec import Find, StageSpec
from tasks.specs.graph import Node, samples_of
from tasks.specs.run_inputs import RunInputs


class RewardSpec(StageSpec):
    """One reward over one artifact of samples."""

    kind = "rewards"
    section: RewardSection
    """The reward."""

    def options(self) -> Mapping[str, Any]:
        """The reward and its options; the weight belongs to the advantages."""
        clips = {"frames": self.section.frames} if self.config.model.frames > 1 else {}
        worst = {} if self.section.over_frames == "mean" else {"over_frames": self.section.over_frames}
        some = {"sources": list(self.section.sources)} if self.section.sources else {}
        return {"reward": self.section.name, "options": self.section.options, **clips, **worst, **some}

    def places(self) -> tuple[Place, ...]:
        """What the reward reads; a server that scores in its place must read the same."""
        return reward_places(self.section)

    def labels(self) -> Mapping[str, str]:
        """Return what says which reward it is, whatever label a run gives it."""
        options = RewardSpec.options(self)
        others = {name: value for name, value in options.items() if name != "reward" and value != {}}
        return {"reward_name": self.section.name, "reward_options": canonical_json(others)}


class ScoreSpec(RewardSpec):
    """A reward or monitor over the trajectories of an epoch."""

    name = "score"

    def __init__(self, facts: RunInputs, epoch: int, slot: str, find: Find) -> None:
        """Bind to a reward of the config.

        Raises:
            ConfigError: the config has no such reward.
        """
        super().__init__(facts, epoch, slot, find)
        self.section = facts.reward_section(slot)

    def upstream(self) -> tuple[Node, ...]:
        """The trajectories, or what was drawn of them."""
        return (samples_of(self.config, self.section, self.epoch),)
