"""Estimates the GPU and host memory of a run by phase, from the models' architectures alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from configs.registry import resolve
from configs.rewards import RewardSection
from configs.schema import RunConfig
from models.memory.language_models import NotMeasuredError
from models.rewards.factory import needs_of, takes_of, why_not_spread, works_on_accelerator
from tasks.inputs.components import make_algorithm
from tasks.modalities.memory import REWARD_MODELS, Memory, OptimizerSizes
from tasks.modalities.modality import make_kind
from tasks.training.optimizers import OPTIMIZERS

#: The phase in which samples are scored, and those that follow it.
SCORE, _AFTER = "score", ("gradient", "optimize")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMemory:
    """Device memory of reward models while samples are scored, in bytes."""

    weights: int
    """Weights of all models that score at the same time."""
    activations: int
    """Activations of the largest call."""
    unknown: tuple[str, ...]
    """Labels of rewards whose models are not counted."""

    @classmethod
    def of(cls, sections: Sequence[RewardSection], ranks: int) -> RewardMemory:
        """Return the memory of rewards on the accelerator of one of ``ranks`` ranks."""
        weights, activations, unknown = {}, 0, []
        for section in sections:
            if not works_on_accelerator(section):
                continue
            taken = takes_of(section.name, section.options)
            if taken is None:
                unknown.append(section.slot)
                continue
            # Labels of the same model share it if they hold it in the same way.
            spread = section.spread and ranks > 1
            held = taken.of_rank(ranks) if spread else taken.weights
            weights[section.name, repr(section.options), section.device, spread] = held
            rows = section.batch_size or needs_of(section.name, section.options).batch_size or 1
            activations = max(activations, rows * taken.row)
        return cls(weights=sum(weights.values()), activations=activations, unknown=tuple(unknown))


@dataclass(frozen=True)
class RunMemory:
    """Memory estimates for one rank, in bytes: policy and rewards. Implements ``Memory``."""

    policy: Memory
    """Estimate of the policy's kind."""
    rewards: RewardMemory
    """Memory of rewards or of judges, whichever is larger."""
    overlapped: bool
    """Whether scoring overlaps sampling, as in a single process; several ranks score after all samples are made."""

    @property
    def parameters(self) -> int:
        """Parameters of the policy."""
        return self.policy.parameters

    @property
    def trained(self) -> int:
        """Trained parameters of the policy."""
        return self.policy.trained

    @property
    def tokens(self) -> int:
        """Tokens of one row."""
        return self.policy.tokens

    @property
    def between(self) -> int:
        """Memory of the policy while samples are scored."""
        return self.policy.between

    @property
    def host(self) -> Mapping[str, int]:
        """Host memory by content."""
        resting = {REWARD_MODELS: self.rewards.weights} if self.rewards.weights else {}
        return {**self.policy.host, **resting}

    @cached_property
    def phases(self) -> dict[str, int]:
        """Memory of every phase; without reward models there is no scoring phase."""
        return {name: sum(line.get(name, 0) for line in self.lines.values()) for name in self._names}

    @property
    def _names(self) -> list[str]:
        names = list(self.policy.phases)
        if self.rewards.weights:
            names.insert(min(names.index(name) for name in _AFTER if name in names), SCORE)
        return names

    @cached_property
    def lines(self) -> dict[str, dict[str, int]]:
        """Parts of the memory by label, then by phase."""
        lines = {label: dict(held) for label, held in self.policy.lines.items()}
        if self.rewards.weights:
            known = self.policy.phases
            sampling = max(size for name, size in known.items() if name not in ("encode", "value", *_AFTER))
            name = "policy, while it samples the next" if self.overlapped else "policy, at rest"
            lines[name] = {SCORE: sampling if self.overlapped else self.policy.between}
            lines[REWARD_MODELS] = {**lines.get(REWARD_MODELS, {}), SCORE: self.rewards.weights}
            lines["their activations"] = {SCORE: self.rewards.activations}
        return lines

    @property
    def notes(self) -> tuple[str, ...]:
        """Limits of the estimate, one sentence each."""
        return (
            *self.policy.notes,
            *(
                f"memory: the model of reward '{label}' is not counted; give it a separate device, or leave it room."
                for label in self.rewards.unknown
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**self.policy.as_dict(), **self.phases, "host": dict(self.host)}

    def advice(self, config: RunConfig, limit: int) -> list[str]:
        """Return changes with which a run fits into ``limit`` bytes per GPU; empty when it already fits."""
        found = self.policy.advice(config, limit)
        if self.phases.get(SCORE, 0) <= limit:
            return found
        if self.phases[SCORE] - self.rewards.activations < limit:
            return [*found, "score: lower rewards[].batch_size"]
        less = self.policy.less_between(config) if self.rewards.weights + self.rewards.activations < limit else ""
        whole = [section.slot for section in (*config.scored, *config.evaluate.judges) if _could_be_spread(section)]
        spread = f"set 'spread: true' of {', '.join(whole)}" if whole and config.execution.ranks > 1 else ""
        return [
            *found,
            f"score: {less and f'{less}, '}{spread and f'{spread}, '}let a server on another GPU score "
            "('flowmill serve-reward', rewards[].server), or give the models of rewards a device of their own "
            "(rewards[].device)",
        ]

    def less_between(self, config: RunConfig) -> str:
        """Return a change that shrinks the policy's memory during scoring; '' if there is none."""
        return self.policy.less_between(config)


def _could_be_spread(section: RewardSection) -> bool:
    """Return whether the ranks could shard the model of a reward that each holds whole now."""
    return not section.spread and works_on_accelerator(section) and why_not_spread(section) is None


def estimate_memory(config: RunConfig, *, reference: bool) -> RunMemory | None:
    """Return the memory of a rank, or None if the architecture is unknown (a built or unpublished model).

    Args:
        config: a checked config.
        reference: whether training compares with the base model.

    Raises:
        NotMeasuredError: a class cannot run without its weights.
    """
    requires = make_algorithm(config).requires
    policy = make_kind(config).memory(config, requires, optimizer_sizes(config), reference=reference)
    return None if policy is None else with_rewards(config, policy)


def memory_and_notes(config: RunConfig, *, reference: bool) -> tuple[RunMemory | None, Sequence[str]]:
    """Return the result of ``estimate_memory`` with its notes, or None with the reason why it cannot be measured."""
    try:
        found = estimate_memory(config, reference=reference)
    except NotMeasuredError as error:
        return None, [str(error)]
    return found, () if found is None else found.notes


def with_rewards(config: RunConfig, policy: Memory) -> RunMemory:
    """Return the memory of a run, given that of its policy."""
    # Judges run after evaluations, when the reward models are no longer loaded.
    ranks = config.execution.ranks
    either = (RewardMemory.of(sections, ranks) for sections in (config.scored, config.evaluate.judges))
    rewards = max(either, key=lambda found: found.weights + found.activations)
    return RunMemory(policy, rewards, config.execution.ranks == 1)


def optimizer_sizes(config: RunConfig) -> OptimizerSizes:
    """Return the properties of the configured optimizer that determine the memory of training."""
    optimizer = resolve(OPTIMIZERS, config.optimize.optimizer, label="optimize.optimizer")
    return OptimizerSizes(moment_bytes=optimizer.moment_bytes, fuses=optimizer.fuses)
