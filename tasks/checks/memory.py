"""Estimates the GPU and host memory of a run by phase, from the models' architectures alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.registry import resolve
from configs.rewards import RewardSection
from configs.schema import RunConfig
from models.memory.language_models import NotMeasuredError
from models.rewards.factory import needs_of, takes_of, works_on_accelerator
from tasks.checks.memory_advice import advice
from tasks.inputs.components import make_algorithm
from tasks.modalities.memory import REWARD_MODELS, SCORE, Memory, OptimizerSizes
from tasks.modalities.modality import make_kind
from tasks.training.optimizers import OPTIMIZERS

#: The phases after samples are scored.
_AFTER = ("gradient", "optimize")


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


def estimate_memory(config: RunConfig, *, reference: bool) -> Memory | None:
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


def memory_and_notes(config: RunConfig, *, reference: bool) -> tuple[Memory | None, Sequence[str]]:
    """Return the result of ``estimate_memory`` with its notes, or None with the reason why it cannot be measured."""
    try:
        found = estimate_memory(config, reference=reference)
    except NotMeasuredError as error:
        return None, [str(error)]
    return found, () if found is None else found.notes


def with_rewards(config: RunConfig, policy: Memory) -> Memory:
    """Return the memory of a run, given that of its policy."""
    # Judges run after evaluations, when the reward models are no longer loaded.
    ranks = config.execution.ranks
    either = (RewardMemory.of(sections, ranks) for sections in (config.scored, config.evaluate.judges))
    rewards = max(either, key=lambda found: found.weights + found.activations)
    notes = (
        f"memory: the model of reward '{label}' is not counted; give it a separate device, or leave it room."
        for label in rewards.unknown
    )
    policy = replace(policy, notes=(*policy.notes, *notes))
    if not rewards.weights:
        return policy
    names, lines, known = list(policy.names), {**policy.lines}, policy.phases
    names.insert(min(names.index(name) for name in _AFTER if name in names), SCORE)
    # A single process scores while it samples; several ranks score after all samples are made.
    sampling = max(size for name, size in known.items() if name not in ("encode", "value", *_AFTER))
    lines["policy, while it samples the next" if ranks == 1 else "policy, at rest"] = {
        SCORE: sampling if ranks == 1 else policy.between
    }
    lines[REWARD_MODELS] = {**lines.get(REWARD_MODELS, {}), SCORE: rewards.weights}
    lines["their activations"] = {SCORE: rewards.activations}
    return replace(policy, names=tuple(names), lines=lines, host={**policy.host, REWARD_MODELS: rewards.weights})


def memory_advice(config: RunConfig, limit: int, *, reference: bool) -> list[str]:
    """Return changes with which a run fits into ``limit`` bytes per GPU; empty when it already fits.

    Args:
        config: a config whose memory is known.
        limit: bytes.
        reference: whether training compares with the base model.
    """

    known: dict[str, Memory] = {}

    def estimated(changed: RunConfig) -> Memory:
        key = changed.model_dump_json()
        if key not in known:
            found = estimate_memory(changed, reference=reference)
            assert found is not None
            known[key] = found
        return known[key]

    return advice(config, limit, lambda changed: estimated(changed).phases, estimated(config).remedies)


def optimizer_sizes(config: RunConfig) -> OptimizerSizes:
    """Return the properties of the configured optimizer that determine the memory of training."""
    optimizer = resolve(OPTIMIZERS, config.optimize.optimizer, label="optimize.optimizer")
    return OptimizerSizes(moment_bytes=optimizer.moment_bytes, fuses=optimizer.fuses)
