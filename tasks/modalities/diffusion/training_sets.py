"""Chooses the sample set of an algorithm: stored transitions, states, or final samples with fresh noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import torch
from torch import Tensor

from flowmill.models.maths.conditioning import Conditioning
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.inputs.components import make_kernel
from flowmill.tasks.inputs.prompts import SOURCE
from flowmill.tasks.modalities.diffusion.conditioning import conditioning_of
from flowmill.tasks.modalities.diffusion.sample_sets import ForwardSet, TransitionSet
from flowmill.tasks.modalities.diffusion.states import Condition, RowMetadata, StateSet
from flowmill.tasks.modalities.modality import Training
from flowmill.tasks.modalities.sample_set import SampleSet
from flowmill.tasks.runs.seeds import derive


def training_set(
    training: Training, shards: Sequence[TrajectoryShard], advantages: pa.Table, requires: Requirements
) -> SampleSet:
    """Return stored transitions, stored states, or final samples to noise again, as the algorithm needs."""
    config, device = training.config, torch.device("cpu") if training.host is None else training.host.device
    ahead, condition = config.execution.ahead, _condition(training, guided=requires.guided)
    seed = derive(config.run.seed, "forward", training.epoch)
    metadata = RowMetadata(prompts=training.context.prompts_by_id, seed=seed) if requires.rewards else None
    if requires.data == "states":
        return StateSet(
            shards,
            advantages,
            calls=requires.calls,
            condition=condition,
            device=device,
            ahead=ahead,
            metadata=metadata,
        )
    if requires.data == "forward" and requires.times is not None:
        times = requires.times
        forward = ForwardSet(
            shards,
            advantages,
            times=times,
            seed=seed,
            condition=condition,
            device=device,
            ahead=ahead,
            gradients=training.gradients,
            metadata=metadata,
        )
        if times.kind == "timesteps" and training.host is not None:
            forward.trained_levels = _trained_levels(training)
        forward.of_one_size = config.data is None or not config.data.buckets
        return forward
    transitions = TransitionSet(
        shards,
        advantages,
        kernel=make_kernel(config),
        means=requires.old_means,
        condition=condition,
        device=device,
        unconditional=training.predicted and config.rollout.unconditional,
        ahead=ahead,
        requires=requires,
    )
    if any(name for name, _ in requires.teachers):
        prompts = training.context.prompts_by_id.items()
        transitions.sources = {prompt_id: str(prompt.metadata[SOURCE]) for prompt_id, prompt in prompts}
    return transitions


def _trained_levels(training: Training) -> Tensor:
    """Return the (N,) noise levels that the base model was trained with."""
    levels: Tensor = training.context.plan.family.trained_levels(training.context.base_folder)
    return levels


def _condition(training: Training, *, guided: bool) -> Condition:
    def condition(ids: Sequence[str]) -> Conditioning:
        assert training.host is not None, "rows were asked for without models"
        by_id = training.context.prompts_by_id
        rows = conditioning_of(training.context, training.host, [by_id[prompt_id] for prompt_id in ids])
        return rows if guided else replace(rows, negative=None)

    return condition
