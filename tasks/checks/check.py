"""Preflight: refuses configs that cannot work before a run starts, and estimates the cost of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import FAMILIES
from flowmill.configs.refusals import Refusal, refuse
from flowmill.configs.registry import Table, chosen, resolve
from flowmill.configs.schema import RunConfig
from flowmill.configs.suggestions import did_you_mean
from flowmill.models.policies import POLICIES
from flowmill.storage.trajectories import TRAJECTORY_STORES
from flowmill.tasks.algorithms.checks import Trained, without_effect
from flowmill.tasks.checks.check_data import check_data
from flowmill.tasks.checks.check_execution import check_execution
from flowmill.tasks.checks.check_render import check_render
from flowmill.tasks.checks.check_rewards import check_followed, check_rewards
from flowmill.tasks.choices import SAMPLERS
from flowmill.tasks.choices.difficulty import level_of
from flowmill.tasks.inputs.components import make_plan
from flowmill.tasks.inputs.model_settings import check_model, check_reference_images
from flowmill.tasks.inputs.policy_kind import kind_name
from flowmill.tasks.inputs.prompts import SOURCE, Prompt
from flowmill.tasks.inputs.quantize_settings import check_frozen
from flowmill.tasks.inputs.trained_weights import check_teachers, check_trained
from flowmill.tasks.metrics.alerts import NAMES
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.runs.opening import has_begun
from flowmill.tasks.runs.seeds import most_of_each
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.training.optimizers import check_optimizer


def _of_kind(plan: RunPlan) -> Iterator[Refusal]:
    """Yield combinations of the policy's kind, the algorithm, and settings that only some of them read."""
    config, requires, modality, name = plan.config, plan.requires, plan.modality, kind_name(plan.config)
    facts, longest, spec = Trained(config=config, requires=requires), modality.longest(config), plan.family_spec
    policy, overlong, stop_kl = config.model.policy, config.advantage.overlong, config.optimize.stop_kl
    denoises: dict[str, bool] = {family.kind: family.denoises for family in FAMILIES.values()}
    if policy in FAMILIES and denoises.get(name, spec.denoises) != spec.denoises:
        yield Refusal("model.kind", f"model.policy '{policy}' is of the kind '{spec.kind}'", "Remove it")
    if requires.kind != (modality.trained_as or name):
        yield Refusal(
            "optimize.algorithm",
            f"model.policy '{policy}' is of the kind '{name}'",
            "Choose an algorithm of that kind",
            f"{facts.algorithm} trains policies of the kind '{requires.kind}', but",
        )
    if requires.desired and not plan.has_data and config.advantage.mode == "negative_only":
        yield Refusal(
            "advantage.mode",
            f"{facts.algorithm} trains only on samples with positive advantages",
            "Set it to 'all' or 'positive_only'",
            "advantage.mode is 'negative_only', but",
        )
    if plan.estimator.per_token and not modality.per_token:
        yield Refusal(
            "advantage.estimator",
            f"which gives every token an advantage, but model.policy '{policy}' makes no tokens",
            "Set it to 'group', or remove it",
            f"advantage.estimator is '{config.advantage.estimator.name}',",
        )
    if overlong is not None:
        where = f"advantage.overlong has a buffer of {overlong.buffer} tokens, but"
        if longest is None:
            yield Refusal("advantage.overlong", f"model.policy '{policy}' makes no texts", "Remove it", where)
        elif overlong.buffer > longest:
            why = f"model.policy '{policy}' ends texts after {longest} tokens (rollout.tokens.max_new)"
            yield Refusal("advantage.overlong", why, "Lower the buffer", where)
    if stop_kl is not None and not requires.approx_kl:
        yield Refusal(
            "optimize.stop_kl",
            f"{facts.algorithm} has no policy ratio, so it measures no approx_kl",
            "Remove optimize.stop_kl, or choose an algorithm with a ratio",
            f"optimize.stop_kl is {stop_kl:g}, but",
        )


def check_config(config: RunConfig, *, rewards: bool = True) -> Cost:
    """Check a config that is not resolved yet, see ``check_plan``."""
    return check_plan(RunPlan(config), rewards=rewards)


def check_plan(plan: RunPlan, *, rewards: bool = True) -> Cost:
    """Check every component, every combination and the prompts of a run; return its cost.

    Args:
        plan: of the config.
        rewards: also build the rewards, which finds missing packages and wrong values.
    """
    config = plan.config
    _check_name("model.policy", config.model.policy, POLICIES)
    if config.render is not None:
        _check_name("render.model.policy", config.render.model.policy, POLICIES)
    _check_name("rollout.store", config.rollout.store, TRAJECTORY_STORES)
    _check_watch(config)
    refuse(config, _of_kind(plan))
    # The base model comes first: later checks depend on its architecture.
    check_model(plan)
    check_execution(plan)
    check_render(plan)
    check_optimizer(config)
    check_data(plan)
    plan.modality.check(plan)
    _check_effects(plan)
    check_frozen(config)
    check_trained(plan)
    check_teachers(plan)
    # Negative prompts have the images of the others.
    check_reference_images(plan, [each for name, split in plan.prompts.items() if name != "negative" for each in split])
    check_rewards(plan, build=rewards)
    check_followed(plan)
    _check_prompts(config, plan.prompt_counts)
    _check_mixture(config, plan.prompts["train"])
    _check_sampler(config, plan.prompts["train"])
    cost: Cost = plan.modality.cost(plan)
    return cost


def _check_effects(plan: RunPlan) -> None:
    """Check that settings have an effect; those of a run that has begun are not changed any more."""
    steps = make_plan(plan.config) if plan.family_spec.denoises else None
    idle = list(without_effect(plan.config, plan.algorithm, steps))
    if idle and not has_begun(plan.config):
        refuse(plan.config, idle)


def _check_watch(config: RunConfig) -> None:
    for rule in config.watch.on:
        if rule not in NAMES:
            raise ConfigError(f"watch.on: there is no rule '{rule}'. {did_you_mean(rule, NAMES)}")


def _check_prompts(config: RunConfig, prompts: Mapping[str, int]) -> None:
    required = config.rollout.prompts_per_epoch
    if config.data is None and required > prompts["train"]:
        raise ConfigError(
            f"rollout.prompts_per_epoch is {required}, but prompts.train holds {prompts['train']} prompts and an epoch "
            f"takes each at most once. Lower it to {prompts['train']} or add prompts."
        )


def _check_mixture(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    sources, per_epoch = config.prompts.sources, config.rollout.prompts_per_epoch
    if not sources:
        return
    weights = [source.weight for source in sources]
    for source, most in zip(sources, most_of_each(weights, per_epoch, config.run.epochs), strict=True):
        has = sum(prompt.metadata[SOURCE] == source.name for prompt in prompts)
        if most > has:
            raise ConfigError(
                f"rollout.prompts_per_epoch is {per_epoch}, of which an epoch takes up to {most} of the source "
                f"'{source.name}', which holds {has} prompts, each at most once. Lower it, or the source's weight."
            )


def _check_sampler(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Check that the sampler of prompts can be created, and has the sources or the levels of prompts that it reads."""
    section = config.prompts
    sampler = chosen(SAMPLERS, section.sampler, label="prompts.sampler")
    for prompt in prompts if getattr(sampler, "level", None) is not None else ():
        try:
            level_of(prompt.metadata, sampler.level)
        except ValueError as error:
            raise ConfigError(
                f"prompts.sampler '{section.sampler.name}' orders prompts by '{sampler.level}', but of the prompt "
                f"{prompt.text!r} {error}. Name a column in which every prompt has a number, or correct the list."
            ) from None
    if section.sampler.name == "sources" and len(section.sources) < 2:
        raise ConfigError(
            "prompts.sampler 'sources' sets the shares of prompts.sources, but there is one list. Name several "
            "sources, or choose another sampler."
        )


def _check_name(label: str, name: str, table: Table) -> None:
    """Check a table name without importing its component; import strings are imported."""
    if name not in table:
        resolve(table, name, label=label)
