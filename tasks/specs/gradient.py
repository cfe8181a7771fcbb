"""Which reward is followed back to the latents of an epoch's samples."""

from __future__ import annotations

from configs.errors import ConfigError
from tasks.specs.base_spec import Find
from tasks.specs.graph import Node, has_gradients
from tasks.specs.run_inputs import RunInputs
from tasks.specs.score import RewardSpec


class GradientSpec(RewardSpec):
    """The gradients of one reward at the samples of an epoch; its weight belongs to training."""

    name = "gradient"
    kind = "gradients"

    def __init__(self, facts: RunInputs, epoch: int, slot: str, find: Find) -> None:
        """Bind to a reward of the config that is optimized.

        Raises:
            ConfigError: the config has no such reward, or its algorithm needs no gradients.
        """
        super().__init__(facts, epoch, slot, find)
        algorithm = facts.config.optimize.algorithm.name
        if not has_gradients(facts.config):
            raise ConfigError(
                f"This run has no stage 'gradient': its optimize.algorithm '{algorithm}' trains on no gradients of "
                "rewards. Those of 'reward_gradient' have it."
            )
        self.section = facts.reward_section(slot)
        if self.section not in facts.config.rewards:
            raise ConfigError(f"There is no gradient of '{slot}': monitors are only watched. Name one of 'rewards'.")

    def upstream(self) -> tuple[Node, ...]:
        """The trajectories, which say how the model that made them decodes."""
        return (Node(self.epoch, "rollout"),)
