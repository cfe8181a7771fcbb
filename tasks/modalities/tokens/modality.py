"""The tokens kind; each method calls the module that implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import torch

from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.causal_lm import TrainableLM
from flowmill.models.policies.critic_lm import CRITIC, TrainableCritic
from flowmill.models.policies.language_classes import check_shares_prompts
from flowmill.models.policies.parts import Part
from flowmill.models.policies.trainable import Trainable
from flowmill.models.rewards.base import Batch as Scored
from flowmill.models.rewards.base import Needs
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.algorithms.tokens import TokenModels
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.inputs.prompts import Prompt, StoredPrompt
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.metrics.image_grids import GRID, grid, side_by_side
from flowmill.tasks.metrics.samples import about_sample
from flowmill.tasks.metrics.texts import Text, write_texts
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.modalities.memory import Memory, OptimizerSizes
from flowmill.tasks.modalities.modality import ExportRequest, Modality, Training, ValueRequest
from flowmill.tasks.modalities.sample_set import SampleSet
from flowmill.tasks.modalities.samplers import Sampler, SamplingContext
from flowmill.tasks.modalities.tokens.checks import check_scored, check_tokens, cost_of_tokens, trial_text
from flowmill.tasks.modalities.tokens.data_texts import DataText, around_answers, read_text, text_samples
from flowmill.tasks.modalities.tokens.estimate import language_memory
from flowmill.tasks.modalities.tokens.exporting import LanguageModelExport
from flowmill.tasks.modalities.tokens.forwards import chosen_rows, forwards
from flowmill.tasks.modalities.tokens.run_prompts import prompts_in, read_prompts, readable
from flowmill.tasks.modalities.tokens.sample_sets import TextSet
from flowmill.tasks.modalities.tokens.text import FINISHES, chosen_lengths, stored_text
from flowmill.tasks.modalities.tokens.text_sampling import evaluation_maker, rollout_maker
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.specs.turns import last_turn

if TYPE_CHECKING:
    from torch import Tensor

    from flowmill.tasks.modalities.modality import ValueRequest
    from flowmill.tasks.runs.context import RunContext
    from flowmill.tasks.runtime.host import ModelHost


class Tokens(Modality):
    """Language models: samples are texts."""

    encodes = False
    per_token = writes = True
    sampling_parts = training_parts = exporting_parts = frozenset({Part.DENOISER})

    def longest(self, config: RunConfig) -> int:
        """Return the maximum tokens of a completion, over all turns."""
        return tokens_of(config).max_new * last_turn(config)

    def truncated(self, config: RunConfig, shard: TrajectoryShard, row: int) -> bool:
        """Return whether a text did not end by itself; in samples of earlier versions, only the tokens of turns before
        the last say whether they did."""
        finish, lengths = shard.array("finish", row), chosen_lengths(shard.array("token_mask", row))
        cut = any(FINISHES[int(each)] == "length" for each in finish)
        return cut or (len(finish) < len(lengths) and max(lengths[:-1]) >= tokens_of(config).max_new)

    def check(self, plan: RunPlan) -> None:
        check_tokens(plan)

    def cost(self, plan: RunPlan) -> Cost:
        return cost_of_tokens(plan)

    def memory(self, plan: RunPlan, optimizer: OptimizerSizes, *, reference: bool) -> Memory | None:
        return language_memory(plan, optimizer, reference=reference)

    def encode(self, host: ModelHost, prompts: Sequence[Prompt]) -> Mapping[str, Tensor]:
        """Never called: prompts are not encoded."""
        raise AssertionError("prompts of language models are not encoded ahead")

    def rollout(self, making: SamplingContext) -> Sampler:
        """Return the sampler of texts, with a seed per token."""
        return rollout_maker(making)

    def around_given(self, plan: RunPlan, folder: Path) -> tuple[str, ...]:
        return around_answers(prompts_in(folder, plan))

    def read_given(self, making: SamplingContext, sample: DataSample) -> DataText:
        return read_text(making, sample)

    def given(self, making: SamplingContext, samples: Sequence[DataSample], contents: Sequence[Any]) -> list[Sample]:
        return text_samples(making, samples, contents)

    def readable(self, context: RunContext, prompts: Sequence[StoredPrompt]) -> Sequence[StoredPrompt]:
        return readable(context, prompts)

    def evaluation(self, making: SamplingContext) -> Sampler:
        """Return the sampler of the likeliest texts, or of draws with fixed seeds."""
        return evaluation_maker(making)

    def check_scored(self, section: RewardSection, needs: Needs, config: RunConfig) -> None:
        check_scored(section, needs, config)

    def trial(self, config: RunConfig) -> np.ndarray:
        return trial_text()

    def scored(self, shard: TrajectoryShard, needs: Needs, recent: Sequence[np.ndarray] | None) -> np.ndarray:
        """Return completions, (B,) objects."""
        return np.array(self.texts(shard), object)

    def texts(self, shard: TrajectoryShard) -> list[str]:
        return [stored_text(shard, row) for row in range(shard.table.num_rows)]

    def show(self, folder: Path, batch: Scored, verdicts: Sequence[str], texts: Sequence[str] | None = None) -> None:
        if verdicts and batch.references:
            captions = list(zip(batch.prompts, map(str, batch.media), verdicts, strict=False))
            grid(side_by_side(batch.references[: len(verdicts)]), captions).save(folder / GRID)
        write_texts(folder, [Text(*each) for each in zip(batch.prompts, batch.media, verdicts, strict=False)])

    def training_set(
        self, training: Training, shards: Sequence[TrajectoryShard], advantages: pa.Table, requires: Requirements
    ) -> SampleSet:
        device = None if training.host is None else training.host.device
        return TextSet(
            shards,
            advantages,
            ahead=training.config.execution.ahead,
            device=device,
            # Units alone are read without a host.
            read=None if training.host is None else read_prompts(training.context),
            shares_prompts=training.config.optimize.shared_prompts,
        )

    def values(self, valuing: ValueRequest, shard: TrajectoryShard) -> Mapping[str, list[np.ndarray] | None]:
        return values_of(valuing, shard)

    def models(self, config: RunConfig, trainable: Trainable, further: Mapping[str, Trainable]) -> TokenModels:
        if config.optimize.shared_prompts:
            check_shares_prompts(cast(TrainableLM, trainable).policy.model)
        return TokenModels(
            trainable=cast(TrainableLM, trainable),
            temperature=tokens_of(config).temperature,
            critic=cast("TrainableCritic | None", further.get(CRITIC)),
        )

    def export(self, exporting: ExportRequest, folder: Path) -> None:
        LanguageModelExport(exporting).write(folder)


@torch.no_grad()
def values_of(valuing: ValueRequest, shard: TrajectoryShard) -> Mapping[str, list[np.ndarray] | None]:
    """Return values and reference log-probs of the chosen tokens, a row per sample, float32.

    Micro-batches have a fixed size, so results do not depend on the division of samples into shards.
    """
    host, config = valuing.host, valuing.context.config
    size, temperature = config.execution.micro_batch_size, tokens_of(config).temperature
    policy = cast(TrainableLM, host.trainable(valuing.policy, Weights.TRAINED))
    critic = cast(TrainableCritic, host.critic.of(valuing.policy)) if valuing.values else None
    if valuing.reference:
        host.give_reference(policy)
    values: dict[int, np.ndarray] = {}
    reference: dict[int, np.ndarray] = {}
    read, names = read_prompts(valuing.context, policy.policy), shard.table.column("prompt_id").to_pylist()
    rows = [
        read.with_images(name, shard.array("tokens", row), partial(about_sample, shard, row))
        for row, name in enumerate(names)
    ]
    masks = [shard.array("token_mask", row).astype(bool) for row in range(len(rows))]
    prompts = [int(mask.argmax()) for mask in masks]
    parts = forwards(rows, prompts, host.device, size=size, widths=read.widths, shared=read.shared)
    for numbers, ids, used in parts:
        if critic is not None:
            hidden = policy.log_probs_and_hidden(ids, temperature, used)[2] if critic.reads_policy else None
            sampled = None
            if critic.reads_log_probs:
                drawn = [shard.array("sampled_log_probs", number) for number in numbers]
                sampled = chosen_rows(ids.shape[1], [masks[number] for number in numbers], drawn, ids.device)
            values |= _chosen(critic.values(ids, hidden, used, sampled), numbers, masks)
        if valuing.reference:
            reference |= _chosen(policy.reference_log_probs(ids, temperature, used), numbers, masks)
    order = range(len(rows))
    return {
        "values": [values[row] for row in order] if valuing.values else None,
        "reference_log_probs": [reference[row] for row in order] if valuing.reference else None,
    }


def _chosen(values: torch.Tensor, numbers: list[int], masks: list[np.ndarray]) -> dict[int, np.ndarray]:
    """Return the values of chosen tokens, by number of the row."""
    table = values.float().cpu().numpy()
    return {number: table[place, : len(masks[number])][masks[number]] for place, number in enumerate(numbers)}
