"""Checks the configs of diffusion policies, and counts the denoiser rows of a run."""

from __future__ import annotations

from flowmill.configs.registry import Table, resolve
from flowmill.configs.schema import RunConfig
from flowmill.configs.user_directories import user_path
from flowmill.models.engines import LOCAL
from flowmill.models.maths import SOLVERS
from flowmill.models.policies.tokenization import check_marks
from flowmill.models.quickstart import BUILDERS
from flowmill.tasks.algorithms.checks import check_advantage_groups, check_replay
from flowmill.tasks.inputs.components import make_kernel, make_plan
from flowmill.tasks.inputs.data_section import heldout_samples, samples_per_epoch
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.modalities.diffusion.setting_combination import Combination, draw_plans
from flowmill.tasks.modalities.diffusion.setting_rules import check_combination
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.runs.sharding import rollout_cuts
from flowmill.tasks.specs.plan import RunPlan


def check_diffusion(plan: RunPlan) -> None:
    """Check samplers, plans and their combinations with other settings."""
    config, requires = plan.config, plan.requires
    _check_name("rollout.solver", config.rollout.solver, SOLVERS)
    _check_name("evaluate.solver", config.evaluate.solver, SOLVERS)
    kernel, steps = make_kernel(config), make_plan(config)
    combination = Combination(
        config=config, kernel=kernel, requires=requires, draws=draw_plans(config, steps), family=plan.family
    )
    check_combination(combination)
    groups, size = combination.rollout_groups
    check_advantage_groups(config, groups=groups, size=size)
    check_replay(config, requires)
    folder = user_path(str(config.model.path))
    if config.model.path is not None and folder.is_dir():
        check_marks(folder, (prompt.text for prompts in plan.prompts.values() for prompt in prompts))


def _check_name(label: str, name: str, table: Table) -> None:
    """Check a table name without importing its entry; import strings are imported."""
    if name not in table:
        resolve(table, name, label=label)


def cost_of_diffusion(plan: RunPlan) -> Cost:
    """Return the cost of a run with a checked config."""
    config, requires, prompts = plan.config, plan.requires, plan.prompt_counts
    steps = draw_plans(config, make_plan(config))[0]
    rollout, calls = config.rollout, 2 if uses_guidance(config) else 1
    trained_calls = calls if requires.guided else 1
    trunks = rollout.prompts_per_epoch * rollout.group_size
    if config.data is not None:
        trunks = samples_per_epoch(config)
    samples = trunks * (steps.branches * len(steps.trained) if steps.branches else 1)
    trained, states = (1, 2) if steps.branches else (len(steps.trained), len(steps.states))
    positions = requires.times.count if requires.times is not None else trained
    if requires.data == "states":
        positions = sum(state + requires.calls <= rollout.steps for state in steps.states)
    branched = sum(steps.branches * (rollout.steps - 1 - step) for step in steps.trained)
    # Servers draw; their steps are compared here.
    forwards = rollout.steps + branched if rollout.engine.name == LOCAL else trained + 1
    used = 2 * rollout.prompts_per_epoch if requires.unit == "pair" and config.data is None else samples
    rows = (
        used
        * positions
        * config.optimize.inner_epochs
        * (1 + (config.optimize.replay.epochs if config.optimize.replay else 0))
    )
    splits = sum(1 for split in ("train", "heldout") if prompts[split])
    values = _latent_values(config)
    width = {"float32": 4, "float16": 2}[rollout.latents_dtype]
    predicted = 4 * trained if rollout.unconditional else 0
    per_epoch = None if values is None else samples * (states * width + predicted) * values
    return Cost(
        prompts=prompts,
        samples_per_epoch=samples,
        rollout_forwards=0 if config.data is not None else trunks * forwards * calls,
        optimize_rows=rows,
        optimize_forwards=rows * trained_calls * requires.calls,
        reference_forwards=rows * trained_calls // config.optimize.inner_epochs * requires.reference
        + 2 * rows * trained_calls * requires.mismatched,
        evaluate_forwards=splits * config.evaluate.samples * (config.evaluate.steps or rollout.steps) * calls,
        validate_forwards=heldout_samples(config)
        * positions
        * trained_calls
        * (requires.calls + requires.reference + 2 * requires.mismatched),
        updates=config.run.epochs * config.optimize.updates_per_epoch * config.optimize.inner_epochs,
        shards_per_epoch=0 if config.data is not None else len(rollout_cuts(config)),
        latent_bytes_per_epoch=per_epoch,
        latent_bytes=None if per_epoch is None else per_epoch * config.run.epochs,
        stores_latents=config.data is None,
        evaluations=plan.evaluations,
        reference=requires.reference or config.advantage.kl_coef > 0,
    )


def _latent_values(config: RunConfig) -> int | None:
    """Return the number of values of one latent, from the model's own or published config files, or the builder."""
    from flowmill.models.memory.architectures import architecture_of

    model = config.model
    if model.build is not None:
        shape = resolve(BUILDERS, model.build.name, label="model.build").latents
        latents = None if shape is None else (*shape, 1)
    else:
        architecture = architecture_of(str(model.path))
        latents = None if architecture is None else architecture.latents
    if latents is None:
        return None
    channels, factor, times = latents
    frames = (model.frames - 1) // times + 1
    return int(channels * frames * (model.height // factor) * (model.width // factor))
