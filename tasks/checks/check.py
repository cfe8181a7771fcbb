"""Preflight: refuses configs that cannot work before a run starts, and estimates the cost of the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.errors import ConfigError
from configs.refusals import Rule, Unused, refuse
from configs.registry import Table, chosen, resolve
from configs.schema import RunConfig
from configs.suggestions import did_you_mean
from models.policies import POLICIES
from storage.trajectories import TRAJECTORY_STORES
from tasks.advantages.estimators import make_estimator
from tasks.algorithms.checks import Trained
from tasks.checks.check_data import check_data
from tasks.checks.check_execution import check_execution
from tasks.checks.check_render import check_render
from tasks.checks.check_rewards import check_followed, check_rewards
from tasks.choices import SAMPLERS
from tasks.inputs.components import make_algorithm
from tasks.inputs.model_settings import check_model, check_reference_images
from tasks.inputs.policy_kind import kind_name
from tasks.inputs.prompts import SOURCE, Prompt
from tasks.inputs.quantize_settings import check_frozen
from tasks.inputs.source_prompts import source_prompts
from tasks.inputs.trained_weights import check_teachers, check_trained
from tasks.metrics.alerts import NAMES
from tasks.modalities.forward_cost import Cost
from tasks.modalities.modality import Kind, make_kind
from tasks.runs.seeds import most_of_each
from tasks.training.optimizers import check_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class OfKind(Trained):
    """A config, the requirements of its algorithm, and its kind of policy."""

    kind: Kind

    @property
    def name(self) -> str:
        """The name of the kind."""
        return kind_name(self.config)

    @property
    def longest(self) -> int | None:
        """The most tokens of a text; None if the policy makes none."""
        return self.kind.longest(self.config)

    @property
    def back(self) -> list[str]:
        """The rules of alerts that take the run back."""
        return list(self.config.watch.rules("back"))


def _acts(on: Mapping[str, str], rule: str) -> str | None:
    """Return the action on a rule if it is more than a warning."""
    return None if on.get(rule) == "warn" else on.get(rule)


#: Combinations of the policy's kind, the algorithm, and the settings that only some of them read.
RUN: tuple[Rule[OfKind], ...] = (
    Rule("optimize.algorithm", lambda f, _: f.requires.kind != (f.kind.trained_as or f.name),
         "model.policy '{model.policy}' is of the kind '{facts.name}'",
         "Choose an algorithm of that kind",
         where="{facts.algorithm} trains policies of the kind '{facts.requires.kind}', but"),
    Rule("advantage.estimator", lambda f, _: make_estimator(f.config).per_token and not f.kind.per_token,
         "which gives every token an advantage, but model.policy '{model.policy}' makes no tokens",
         "Set it to 'group', or remove it", where="{setting} is '{value.name}',"),
    Rule("advantage.overlong", lambda f, _: f.longest is None,
         "model.policy '{model.policy}' makes no texts",
         "Remove it", where="{setting} has a buffer of {value.buffer} tokens, but"),
    Rule("advantage.overlong", lambda f, overlong: overlong.buffer > f.longest,
         "model.policy '{model.policy}' ends texts after {facts.longest} tokens (rollout.tokens.max_new)",
         "Lower the buffer", where="{setting} has a buffer of {value.buffer} tokens, but"),
    Unused("critic", lambda f, _: not f.requires.critic,
           "{facts.algorithm} trains none, so it would do nothing",
           "Remove it, or choose the algorithm 'ppo'", where="{setting} is set, but"),
    Rule("optimize.stop_kl", lambda f, _: not f.requires.approx_kl,
         "{facts.algorithm} has no policy ratio, so it measures no approx_kl",
         "Remove {setting}, or choose an algorithm with a ratio", where="{setting} is {value:g}, but"),
    Rule("optimize.stop_kl", lambda f, _: f.config.optimize.updates_per_epoch * f.config.optimize.inner_epochs == 1,
         "an epoch has one update, before which the policy has not moved",
         "Remove {setting}, or raise optimize.updates_per_epoch", where="{setting} is {value:g}, but"),
    Rule("execution.ahead optimize.replay", lambda f, value: f.back and value,
         "with {setting} epochs after that would train on samples of the policy that is left",
         "Remove {setting}, or choose 'stop'", where="watch.on.{facts.back[0]} is 'back', but"),
    Rule("watch.on", lambda f, on: not f.config.monitors and _acts(on, "monitor"),
         "there are no monitors, so the rule never fires",
         "Add some, or remove it", where="watch.on.monitor is '{found}', but"),
    Rule("watch.on", lambda f, on: not f.config.prompts.lists("heldout") and _acts(on, "heldout"),
         "there are no held-out prompts, so the rule never fires",
         "Set prompts.heldout, or remove it", where="watch.on.heldout is '{found}', but"),
    Rule("watch.on", lambda f, on: not f.requires.approx_kl and _acts(on, "kl"),
         "{facts.algorithm} has no policy ratio and measures no approx_kl, so the rule never fires",
         "Remove it, or choose an algorithm with a ratio", where="watch.on.kl is '{found}', but"),
    Rule("watch.on", lambda f, on: not f.requires.critic and _acts(on, "explained_variance"),
         "{facts.algorithm} trains no critic, so the rule never fires",
         "Remove it, or choose the algorithm 'ppo'", where="watch.on.explained_variance is '{found}', but"),
)  # fmt: skip


def check_config(config: RunConfig, *, rewards: bool = True) -> Cost:
    """Check every component, every combination and the prompts; return the cost of the run.

    Args:
        config: the config.
        rewards: also build the rewards, which finds missing packages and wrong values.

    Raises:
        ConfigError: a setting cannot work.
        PromptError: a prompt source cannot be used.
    """
    _known("model.policy", config.model.policy, POLICIES)
    if config.render is not None:
        _known("render.model.policy", config.render.model.policy, POLICIES)
    _known("rollout.store", config.rollout.store, TRAJECTORY_STORES)
    _check_registered(config)
    _check_watch(config)
    kind, requires = make_kind(config), make_algorithm(config).requires
    refuse(RUN, OfKind(config=config, requires=requires, kind=kind))
    # The base model comes first: later checks depend on its architecture.
    check_model(config)
    check_execution(config)
    check_render(config)
    check_optimizer(config)
    check_data(config, requires)
    kind.check(config, requires)
    check_frozen(config)
    check_trained(config)
    check_teachers(config)
    sources = source_prompts(config)
    # Negative prompts have the images of the others.
    check_reference_images(config, [each for name, split in sources.items() if name != "negative" for each in split])
    check_rewards(config, sources, build=rewards)
    check_followed(config, requires)
    prompts = {split: len(items) for split, items in sources.items()}
    _check_prompts(config, prompts)
    _check_mixture(config, sources["train"])
    _check_sampler(config)
    return kind.cost(config, requires, prompts)


def _check_watch(config: RunConfig) -> None:
    for rule in config.watch.on:
        if rule not in NAMES:
            raise ConfigError(f"watch.on: there is no rule '{rule}'. {did_you_mean(rule, NAMES)}")


def _check_registered(config: RunConfig) -> None:
    """Check the name of the registered model, which MLflow would refuse only after training."""
    name = config.tracking.registered_model
    if name is not None and (not name.strip() or set("/:") & set(name)):
        raise ConfigError(
            f"tracking.registered_model is {name!r}, but names of MLflow's model registry are not empty and hold "
            "neither '/' nor ':', so the trained model could not be registered. Choose another, such as "
            f"'{re.sub('[/:]+', '-', name).strip(' -') or 'my-model'}'."
        )


def _check_prompts(config: RunConfig, prompts: Mapping[str, int]) -> None:
    wanted = config.rollout.prompts_per_epoch
    if config.data is None and wanted > prompts["train"]:
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


def _check_sampler(config: RunConfig) -> None:
    """Check that the sampler of prompts can be made, and that it has sources if it shares them out."""
    section = config.prompts
    chosen(SAMPLERS, section.sampler, label="prompts.sampler")
    if section.sampler.name == "sources" and len(section.sources) < 2:
        raise ConfigError(
            "prompts.sampler 'sources' sets the shares of prompts.sources, but there is one list. Name several "
            "sources, or choose another sampler."
        )


def _known(label: str, name: str, table: Table) -> None:
    """Check a table name without importing its component; import strings are imported."""
    if name not in table:
        resolve(table, name, label=label)
