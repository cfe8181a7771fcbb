"""Estimates the GPU and host memory of a run by phase, from the models' architectures alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.memory.tracing import NotMeasuredError
from flowmill.tasks.modalities.memory import REWARD_MODELS, SCORE, Memory, OptimizerSizes, RewardMemory
from flowmill.tasks.runs.memory_errors import REMEDIES
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.training.optimizers import OPTIMIZERS

#: The phases after samples are scored.
_AFTER = ("gradient", "optimize")


def estimate_memory(plan: RunPlan, *, reference: bool) -> Memory | None:
    """Return the memory of a rank, or None if the architecture is unknown (a built or unpublished model).

    Args:
        plan: of a checked config.
        reference: whether training compares with the base model.

    Raises:
        NotMeasuredError: a class cannot run without its weights.
    """
    optimizer = resolve(OPTIMIZERS, plan.config.optimize.optimizer, label="optimize.optimizer")
    sizes = OptimizerSizes(moment_bytes=optimizer.moment_bytes, step_bytes=optimizer.step_bytes)
    policy = plan.modality.memory(plan, sizes, reference=reference)
    return None if policy is None else with_rewards(plan.config, policy)


def memory_and_notes(plan: RunPlan, *, reference: bool) -> tuple[Memory | None, Sequence[str]]:
    """Return the result of ``estimate_memory`` with its notes, or None with the reason why it cannot be measured."""
    try:
        memory = estimate_memory(plan, reference=reference)
    except NotMeasuredError as error:
        return None, [str(error)]
    return memory, () if memory is None else memory.notes


def with_rewards(config: RunConfig, policy: Memory) -> Memory:
    """Return the memory of a run from that of its policy."""
    # Judges run after evaluations, when the reward models are no longer loaded.
    ranks = config.execution.ranks
    either = (RewardMemory.of(sections) for sections in (config.scored, config.evaluate.judges))
    rewards = max(either, key=lambda part: part.weights + part.activations)
    notes = (
        f"memory: the model of reward '{label}' is not counted; give it a separate device, or leave it room."
        for label in rewards.unknown
    )
    policy = replace(policy, notes=(*policy.notes, *notes))
    if not rewards.weights:
        return policy
    names, lines, phases = list(policy.names), {**policy.lines}, policy.phases
    names.insert(min(names.index(name) for name in _AFTER if name in names), SCORE)
    # A single process scores while it samples; several ranks score after all samples are drawn.
    sampling = max(size for name, size in phases.items() if name not in ("encode", "value", *_AFTER))
    lines["policy, while it samples the next" if ranks == 1 else "policy, at rest"] = {
        SCORE: sampling if ranks == 1 else policy.between
    }
    lines[REWARD_MODELS] = {**lines.get(REWARD_MODELS, {}), SCORE: rewards.weights}
    lines["their activations"] = {SCORE: rewards.activations}
    return replace(policy, names=tuple(names), lines=lines, host={**policy.host, REWARD_MODELS: rewards.weights})


def memory_advice(memory: Memory, limit: int) -> list[str]:
    """Return the phases that need more than ``limit`` bytes per GPU, a line each with the changes that need less."""
    over = ((name, size) for name, size in memory.phases.items() if size > limit)
    return [f"{name}: {size / 1e9:.1f} GB. {REMEDIES[name]}" for name, size in over]
