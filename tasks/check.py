"""Preflight: refuses what cannot work before any work starts, and says what a run will cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from configs.errors import ConfigError
from configs.registry import Table, resolve
from configs.schema import RunConfig
from models.policies import POLICIES
from models.quickstart import BUILDERS
from models.schedules import Steps
from models.solvers import SOLVERS
from storage.trajectories import TRAJECTORY_STORES
from tasks.algorithms.base import Requirements
from tasks.algorithms.checks import check_advantage, check_replay
from tasks.chain import is_evaluated
from tasks.check_rewards import check_rewards
from tasks.combinations import Combination, check_combination, draw_plans
from tasks.components import make_algorithm, make_kernel, make_plan
from tasks.execution.checks import check_execution
from tasks.model_settings import check_model
from tasks.optimize.optimizers import check_optimizer
from tasks.prompts import SOURCE, Prompt, source_prompts, uses_guidance
from tasks.seeds import most_of_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one epoch and the whole run take, counted from the config."""

    prompts: Mapping[str, int]
    """Prompts by split."""
    samples_per_epoch: int
    """Images generated per epoch."""
    rollout_forwards: int
    """Rows through the denoiser per epoch's rollouts (twice as many with guidance)."""
    optimize_rows: int
    """(sample, step) rows trained per epoch at most; rows of zero-advantage groups are left out."""
    optimize_forwards: int
    """Rows through the denoiser with gradient per epoch at most, guidance included."""
    reference_forwards: int
    """Rows through the base model per epoch."""
    evaluate_forwards: int
    """Rows through the denoiser per evaluation."""
    updates: int
    """Optimizer updates in the whole run."""
    shards_per_epoch: int
    """Trajectory shards per epoch."""
    latent_bytes_per_epoch: int | None
    """Bytes of stored latents per epoch, predictions included; None while the model's latent shape is not known."""
    latent_bytes: int | None
    """Bytes of stored latents in the whole run."""
    evaluations: int
    """Evaluations in the whole run."""
    reference: bool
    """Whether the base model's velocities are needed."""

    @property
    def latent_bytes_per_million(self) -> int | None:
        """Bytes of stored latents per million samples."""
        per_epoch = self.latent_bytes_per_epoch
        return None if per_epoch is None else round(per_epoch / self.samples_per_epoch * 1e6)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def check_config(config: RunConfig, *, rewards: bool = True) -> Cost:
    """Check every component, every combination and the prompts; return what the run costs.

    Args:
        config: the config.
        rewards: also build the rewards, which finds missing packages and wrong values.

    Raises:
        ConfigError: something cannot work.
        PromptError: a prompt source cannot be used.
    """
    _known("model.policy", config.model.policy, POLICIES)
    _known("rollout.solver", config.rollout.solver, SOLVERS)
    _known("evaluate.solver", config.evaluate.solver, SOLVERS)
    _known("rollout.store", config.rollout.store, TRAJECTORY_STORES)
    kernel, plan, requires = make_kernel(config), make_plan(config), make_algorithm(config).requires
    check_execution(config)
    check_optimizer(config)
    check_model(config)
    draws = draw_plans(config, plan)
    check_combination(Combination(config=config, kernel=kernel, requires=requires, draws=draws))
    check_advantage(config)
    check_replay(config, requires, kernel)
    sources = source_prompts(config)
    check_rewards(config, sources, build=rewards)
    prompts = {split: len(items) for split, items in sources.items()}
    _check_prompts(config, prompts)
    _check_mixture(config, sources["train"])
    return _cost(config, prompts, draws[0], requires)


def _check_prompts(config: RunConfig, prompts: Mapping[str, int]) -> None:
    wanted = config.rollout.prompts_per_epoch
    if wanted > prompts["train"]:
        raise ConfigError(
            f"rollout.prompts_per_epoch is {wanted}, but prompts.train holds {prompts['train']} prompts and an epoch "
            f"takes each at most once. Lower it to {prompts['train']} or add prompts."
        )


def _check_mixture(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    sources, wanted = config.prompts.sources, config.rollout.prompts_per_epoch
    if not sources:
        return
    weights = [source.weight for source in sources]
    for source, most in zip(sources, most_of_each(weights, wanted, config.run.epochs), strict=True):
        has = sum(prompt.metadata[SOURCE] == source.name for prompt in prompts)
        if most > has:
            raise ConfigError(
                f"rollout.prompts_per_epoch is {wanted}, of which an epoch takes up to {most} of the source "
                f"'{source.name}', which holds {has} prompts, each at most once. Lower it, or the source's weight."
            )


def _known(what: str, name: str, table: Table) -> None:
    """Check a table name without importing what it stands for; import strings are imported."""
    if name not in table:
        resolve(table, name, what=what)


def _cost(config: RunConfig, prompts: Mapping[str, int], steps: Steps, requires: Requirements) -> Cost:
    rollout, calls = config.rollout, 2 if uses_guidance(config) else 1
    trunks = rollout.prompts_per_epoch * rollout.group_size
    samples = trunks * (steps.branches * len(steps.trained) if steps.branches else 1)
    trained, states = (1, 2) if steps.branches else (len(steps.trained), len(steps.states))
    positions = requires.times.count if requires.times is not None else trained
    branched = sum(steps.branches * (rollout.steps - 1 - step) for step in steps.trained)
    used = 2 * rollout.prompts_per_epoch if requires.unit == "pair" else samples
    rows = (
        used
        * positions
        * config.optimize.inner_epochs
        * (1 + (config.optimize.replay.epochs if config.optimize.replay else 0))
    )
    splits = sum(1 for split in ("train", "heldout") if prompts[split])
    evaluations = 1 + sum(1 for epoch in range(1, config.run.epochs + 1) if is_evaluated(config, epoch))
    values = _latent_values(config)
    width = {"float32": 4, "float16": 2}[rollout.latents_dtype]
    predicted = 4 * trained if rollout.unconditional else 0
    per_epoch = None if values is None else samples * (states * width + predicted) * values
    return Cost(
        prompts=prompts,
        samples_per_epoch=samples,
        rollout_forwards=trunks * (rollout.steps + branched) * calls,
        optimize_rows=rows,
        optimize_forwards=rows * calls,
        reference_forwards=rows * calls // config.optimize.inner_epochs if requires.reference else 0,
        evaluate_forwards=splits * config.evaluate.samples * (config.evaluate.steps or rollout.steps) * calls,
        updates=config.run.epochs * config.optimize.updates_per_epoch * config.optimize.inner_epochs,
        shards_per_epoch=math.ceil(rollout.prompts_per_epoch / rollout.groups_per_shard),
        latent_bytes_per_epoch=per_epoch,
        latent_bytes=None if per_epoch is None else per_epoch * config.run.epochs,
        evaluations=evaluations,
        reference=requires.reference or config.advantage.kl_coef > 0,
    )


def _latent_values(config: RunConfig) -> int | None:
    """Return the values of one latent, from the model's own config files, the published ones, or the builder."""
    from models.architectures import architecture_of

    model = config.model
    if model.build is not None:
        shape = resolve(BUILDERS, model.build.name, what="model.build").latents
        latents = None if shape is None else (*shape, 1)
    else:
        architecture = architecture_of(str(model.path))
        latents = None if architecture is None else architecture.latents
    if latents is None:
        return None
    channels, factor, times = latents
    frames = (model.frames - 1) // times + 1
    return int(channels * frames * (model.height // factor) * (model.width // factor))
