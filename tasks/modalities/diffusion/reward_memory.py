"""GPU memory of reward gradients: decoder, rewards, and their activations for the rows of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards.factory import takes_of, works_on_accelerator
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.modalities.diffusion.activations import Activations, rows_of_rewards
from flowmill.tasks.modalities.diffusion.trained_rewards import decoded_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGradientMemory:
    """Estimates for one rank, in bytes."""

    training: bool
    """They are computed while the policy is trained; else in a separate stage, which has the decoder anyway."""
    decoder: int
    """The autoencoder; 0 if no reward reads images."""
    models: int
    """Weights of rewards on the policy's device."""
    work: int
    """Activations of the rows that are decoded, scored and backpropagated at once."""
    kept: int
    """Activations that the policy keeps during reward calls, for a micro-batch."""
    unknown: tuple[str, ...]
    """Labels of rewards with unknown gradient memory."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Omissions of the estimate, a sentence each."""
        return tuple(
            f"memory: activations of the gradient of reward '{label}' are not counted; leave room for them."
            for label in self.unknown
        )


def memory_of_rewards(
    config: RunConfig, requires: Requirements, row: Activations, *, decoder: int
) -> RewardGradientMemory | None:
    """Return the memory of reward gradients, None if the algorithm needs none.

    Args:
        config: the config.
        requires: its algorithm's needs.
        row: memory of batches of the policy and its decoder.
        decoder: bytes of the autoencoder.
    """
    if not requires.rewards and not requires.gradients:
        return None
    placed = [section for section in config.rewards if works_on_accelerator(section)]
    # The stage computes one reward at a time; training computes all of them, once per prompt of a question.
    groups = [placed] if requires.rewards else [[section] for section in placed]
    weights = max((_weights(group) for group in groups), default=0)
    rows = rows_of_rewards(config, requires)
    scoring = max((sum(_followed(section) for section in group) for group in groups), default=0)
    looks = bool(decoded_parts(config))
    return RewardGradientMemory(
        training=bool(requires.rewards),
        decoder=decoder if looks else 0,
        models=weights,
        work=looks * row.following + rows * max(1, requires.rewards) * scoring,
        kept=requires.calls * row.retained // config.execution.context_parallel,
        unknown=tuple(section.slot for section in placed if not _followed(section)),
    )


def _weights(sections: Sequence[RewardSection]) -> int:
    """Return the bytes of models; labels with the same model share it."""
    taken = {
        (section.name, repr(section.options), section.device): takes_of(section.name, section.options)
        for section in sections
    }
    return sum(memory.weights for memory in taken.values() if memory is not None)


def _followed(section: RewardSection) -> int:
    memory = takes_of(section.name, section.options)
    return 0 if memory is None or memory.followed is None else memory.followed
