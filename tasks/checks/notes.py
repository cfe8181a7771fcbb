"""Notes on valid training configs, printed by ``flowmill check``; they never refuse a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowmill.configs.schema import RunConfig
from flowmill.configs.user_directories import user_path
from flowmill.models.memory.language_architectures import language_config, meta_language_model
from flowmill.models.policies import POLICIES
from flowmill.models.policies.few_steps import few_step_sign
from flowmill.models.policies.tokenization import cut_notes as cut_of
from flowmill.models.policies.tokenization import load_tokenizers
from flowmill.models.rewards.factory import needs_of
from flowmill.models.weights.lora import stack_note
from flowmill.tasks.algorithms.checks import switched_off
from flowmill.tasks.inputs.components import make_plan
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.modalities.rows import padded
from flowmill.tasks.runs.sharding import costs, rollout_cuts
from flowmill.tasks.training.learning_rates import learning_rate

if TYPE_CHECKING:
    from flowmill.tasks.modalities.forward_cost import Cost

#: Ratio of computed to used rows from which padding gets a note.
_WASTE = 1.1


def training_notes(plan: ResolvedConfig, *, updates: int) -> list[str]:
    """Return notes on a config with ``updates`` optimizer updates in the whole run."""
    config = plan.config
    notes = [note for note in (_guidance(config), _schedule(config, updates)) if note is not None]
    return [
        *notes,
        *_few_steps(plan),
        *_without_adapters(plan),
        *switched_off(config, plan.algorithm, make_plan(config) if plan.family_spec.denoises else None),
        *plan.requires.notes,
        *_unwatched(config),
    ]


def cut_notes(plan: ResolvedConfig) -> list[str]:
    """Return notes on prompts that the tokenizers of a local model truncate; for others 'flowmill run' reports them."""
    model, notes = plan.config.model, list[str]()
    folder = user_path(str(model.path))
    if model.path is None or not folder.is_dir() or model.policy not in POLICIES:
        return []
    tokenizers = load_tokenizers(folder, readers := plan.family.readers)
    for split, prompts in plan.prompts.items():
        texts = [prompt.text for prompt in prompts]
        notes += [f"prompts.{split}: {note}" for note in cut_of(readers, tokenizers, plan.model_options, texts)]
    return notes


def padding_notes(config: RunConfig, cost: Cost) -> list[str]:
    """Return notes on stages where a tenth or more of the computed rows are padding."""
    rollout, execution = config.rollout, config.execution
    notes, batch, size = [], execution.rollout_batch_size, execution.micro_batch_size
    samples = rollout.prompts_per_epoch * rollout.group_size
    computed = sum(costs(rollout_cuts(config), batch)) * batch
    branching = cost.samples_per_epoch > rollout.prompts_per_epoch * rollout.group_size
    if computed >= _WASTE * samples and not branching:
        notes.append(
            f"rollout: the {samples} samples of an epoch are computed as {computed} rows in "
            f"{len(rollout_cuts(config))} shards, as every batch has execution.rollout_batch_size {batch}. One that "
            f"divides rollout.group_size {rollout.group_size} wastes nothing."
        )
    # A run of no epochs has no updates.
    rows = cost.optimize_rows * config.run.epochs // max(1, cost.updates)
    chunks = -(-rows // size)
    computed = chunks * padded(-(-rows // chunks), size) if chunks else 0
    if chunks and computed >= _WASTE * rows:
        notes.append(
            f"optimize: the {rows} rows of an update are computed as {computed}, in {chunks} micro-batches of "
            f"execution.micro_batch_size {size} at most. Numbers of rows are sixteenths of it, and at least 4."
        )
    return notes


def _unwatched(config: RunConfig) -> list[str]:
    present = {section.name for section in config.monitors}
    return [
        f"rewards: {why} ('{section.name}'). The monitor '{monitor}' tells when: monitors=[{{name: {monitor}}}]."
        for section in config.rewards
        if section.server is None
        for monitor, why in needs_of(section.name, section.options).watched_by
        if monitor not in present
    ]


def _guidance(config: RunConfig) -> str | None:
    if not uses_guidance(config) or config.optimize.guidance_gradient != "conditional":
        return None
    scale = config.model.guidance_scale
    return (
        f"optimize.guidance_gradient 'conditional' is not the gradient of the log-prob that is replayed: with "
        f"model.guidance_scale {scale:g} its slope is about {scale:g} times too large, and its direction another "
        "(cosine 0.93 on SD3, 0.99 on Qwen-Image). 'both' is exact and takes a backward pass through both halves."
    )


def _few_steps(plan: ResolvedConfig) -> list[str]:
    """Return notes on bases and start adapters distilled to few steps, if the loss is that of the forward process."""
    config, model = plan.config, plan.config.model
    if plan.requires.data != "forward" or not plan.family_spec.denoises:
        return []
    named = {"model.path": model.path, "model.lora.start": None if model.lora is None else model.lora.start}
    signs = {label: few_step_sign(model.policy, path) for label, path in named.items() if path is not None}
    return [
        f"{label} '{named[label]}' is distilled to few steps ({sign}), and optimize.algorithm "
        f"'{config.optimize.algorithm.name}' trains on samples that are noised again: its loss pulls predictions "
        "towards the velocity of many steps, so that samples of few steps blur while the loss falls. Train the model "
        "that it was distilled from, or choose an algorithm that trains on the steps of rollouts, such as 'grpo'."
        for label, sign in signs.items()
        if sign is not None
    ]


def _without_adapters(plan: ResolvedConfig) -> list[str]:
    model = plan.config.model
    if model.lora is None or model.path is None or plan.family_spec.denoises:
        return []
    language = language_config(model.path)
    note = None if language is None else stack_note(meta_language_model(language, models=plan.family.models))
    return [] if note is None else [note]


def _schedule(config: RunConfig, updates: int) -> str | None:
    schedule = config.optimize.schedule
    if schedule is None or updates == 0:
        return None
    if schedule.warmup_updates >= updates:
        return (
            f"optimize.schedule.warmup_updates is {schedule.warmup_updates}, but the run has {updates} at most: "
            "the full learning rate is never reached."
        )
    if schedule.total_updates is not None and learning_rate(config.optimize, updates - 1) == 0:
        return (
            f"optimize.schedule.total_updates is {schedule.total_updates}, but the run has up to {updates} updates: "
            "from there on the learning rate is 0 and nothing is learned. Raise it, or set 'final' above 0."
        )
    return None
