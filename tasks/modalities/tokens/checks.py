"""Checks the configs of causal language models, and counts the cost of a run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from flowmill.configs.advantages import AdvantageSection
from flowmill.configs.errors import ConfigError
from flowmill.configs.refusals import Refusal, never_called, refuse, set_settings
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.configs.user_directories import user_path
from flowmill.models.engines import LOCAL, make_engine
from flowmill.models.memory.language_architectures import check_class
from flowmill.models.policies.language_model_folders import check_critic, check_folder, check_vocabulary
from flowmill.models.rewards.base import Needs
from flowmill.tasks.advantages.estimators import Estimator
from flowmill.tasks.algorithms.checks import Trained, check_advantage_groups, check_replay, compared_rows
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.inputs.data_section import heldout_samples, samples_per_epoch
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.inputs.weight_sources import critic_folder
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.modalities.tokens.run_prompts import longest_prompt
from flowmill.tasks.runs.sharding import rollout_cuts
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.specs.turns import last_turn

#: Settings of ``advantage`` that act on advantages of samples.
_OF_SAMPLES = (
    *("aggregation", "std", "mean", "mode", "best_of", "clip", "soft_clip"),
    *("group_mean_min", "group_mean_max", "diversity"),
)


def _settings_of_images(facts: Trained) -> Iterator[Refusal]:
    config, algorithm = facts.config, facts.algorithm
    yield from never_called(
        config,
        "rollout.sampler rollout.plan rollout.solver rollout.engine evaluate.solver",
        "texts are drawn token by token, without it",
    )
    if config.execution.sampling == "spread" or config.execution.context_parallel > 1:
        where = "execution.context_parallel and execution.sampling 'spread'"
        yield Refusal("execution.sampling", "split denoisers", "Remove them", where)
    if config.advantage.kl_coef > 0:
        where = "advantage.kl_coef is for KLs that rollouts store,"
        yield Refusal("advantage.kl_coef", "which texts' do not", "Use the algorithm's kl_coef", where)
    if facts.group < (least := facts.requires.min_group_size):
        yield Refusal("rollout.group_size", f"{algorithm} compares {least} completions or more", "Raise it")


def _estimator(facts: Trained, estimator: Estimator) -> Iterator[Refusal]:
    section, requires, algorithm = facts.config.advantage.estimator, facts.requires, facts.algorithm
    for refused, why, remedy in (
        (
            requires.critic and not estimator.needs_values,
            "trains a critic, and only 'gae' reads one's values",
            "Set advantage.estimator to 'gae'",
        ),
        (
            estimator.needs_values and not requires.critic,
            "trains no critic, and only 'gae' reads one's values",
            "Set advantage.estimator to 'group', or choose the algorithm 'ppo'",
        ),
        (
            requires.per_token and not estimator.per_token,
            "takes advantages of tokens",
            "Remove it to use the algorithm's own",
        ),
        (
            estimator.per_token and requires.normalization,
            "is defined with advantages of samples",
            "Set advantage.estimator to 'group', or choose 'grpo', which takes any",
        ),
        (
            estimator.per_token and requires.unit != "row",
            "compares whole samples",
            "Set advantage.estimator to 'group'",
        ),
    ):
        if refused:
            where = f"advantage.estimator is '{section.name}', but"
            yield Refusal("advantage.estimator", f"{algorithm} {why}", remedy, where)
    for name in _OF_SAMPLES if estimator.per_token else ():
        if getattr(facts.config.advantage, name) != AdvantageSection.model_fields[name].default:
            yield Refusal(
                f"advantage.{name}",
                f"advantage.estimator '{section.name}' gives every token one",
                "Remove it, or set advantage.estimator to 'group'",
                f"advantage.{name} acts on advantages of samples, but",
            )
    in_loss, in_reward = facts.config.optimize.algorithm.options.get("kl_coef", 0.0), getattr(estimator, "kl_coef", 0.0)
    if in_loss and in_reward:
        yield Refusal(
            "optimize.algorithm",
            f"{algorithm} has {in_loss}: the KL would count twice, in the reward and in the loss",
            "Set one of them to 0",
            f"advantage.estimator '{section.name}' has kl_coef {in_reward} and",
        )


def _engine(config: RunConfig) -> Iterator[Refusal]:
    """Yield settings of the engine that draws texts that would change or bias other rollouts."""
    section, dtype, execution = tokens_of(config), config.model.dtype, config.execution
    several = execution.processes * execution.nodes > 1 and execution.strategy != "fsdp"
    if make_engine(section.engine).reloads and (several or execution.runner.name != "threads"):
        yield Refusal(
            "rollout.tokens.engine",
            "rollouts are made by several independent processes, and one would change the weights that another draws "
            "with",
            "Set execution.processes to 1 and execution.runner to 'threads', or execution.strategy to 'fsdp'",
            "rollout.tokens.engine brings weights to a server (option 'folder'), but",
        )
    if not section.rescore and section.engine.name != LOCAL:
        yield Refusal(
            "rollout.tokens.rescore",
            f"rollout.tokens.engine '{section.engine.name}' draws with kernels of its own, from which ratios would be "
            "biased",
            "Remove rollout.tokens.rescore",
            "rollout.tokens.rescore is false, but",
        )
    if not section.rescore and dtype != "float32":
        yield Refusal(
            "rollout.tokens.rescore",
            f"with model.dtype '{dtype}' log-probs with a KV cache differ from those of training by up to 1e-2",
            "Remove rollout.tokens.rescore, or set model.dtype to 'float32'",
            "rollout.tokens.rescore is false, but",
        )


def _critic(facts: Trained) -> Iterator[Refusal]:
    """Yield settings of the critic that do not go together, and advantages other than the algorithm's own."""
    config, critic = facts.config, facts.config.critic
    head = "with critic.backbone 'policy' the critic is a head on the policy's hidden states"
    if critic.backbone == "policy" and critic.log_probs:
        remedy = "Set critic.backbone to 'own', or remove critic.log_probs"
        yield Refusal("critic.log_probs", f"{head}, and reads no tokens", remedy, "critic.log_probs is true, but")
    if critic.backbone == "policy" and critic.path is not None:
        yield Refusal("critic.path", f"{head}, where those are", "Set critic.backbone to 'own', or remove it")
    for name, value in facts.requires.normalization:
        if (own := getattr(config.advantage, name)) != value:
            yield Refusal(
                f"advantage.{name}",
                f"{facts.algorithm} is defined with '{value}'",
                f"Set advantage.{name} to '{value}', or choose 'grpo', which takes any",
                f"advantage.{name} is '{own}', but",
            )


def _shared_prompts(facts: Trained) -> Iterator[Refusal]:
    """Yield a micro-batch that is smaller than a group whose texts share their prompt, and so a forward."""
    size, group = facts.config.execution.micro_batch_size, facts.group
    if facts.config.optimize.shared_prompts and facts.requires.unit == "row" and size < group:
        yield Refusal(
            "execution.micro_batch_size",
            f"execution.micro_batch_size is {size}",
            f"Set it to {group} or more, or optimize.shared_prompts to false",
            f"with optimize.shared_prompts the {group} texts of a group share a forward, but",
        )


def _steps(config: RunConfig) -> Iterator[Refusal]:
    for setting, _ in set_settings(config, "optimize.replay.steps"):
        yield Refusal(setting, "a text is one row of training, without steps", f"Remove {setting}")


def check_tokens(plan: RunPlan) -> None:
    """Check the settings of samples of tokens."""
    config, facts = plan.config, Trained(config=plan.config, requires=plan.requires)
    refuse(config, chain(_settings_of_images(facts), _estimator(facts, plan.estimator), _engine(config)))
    _check_base(plan)
    refuse(config, _critic(facts))
    if config.critic.path is not None:
        _check_critic(plan, config.critic.path)
    check_advantage_groups(config, groups=config.rollout.prompts_per_epoch, size=config.rollout.group_size)
    refuse(config, chain(compared_rows(facts), _shared_prompts(facts), _steps(config)))
    check_replay(config, plan.requires)


def _check_base(plan: RunPlan) -> None:
    """Check a local model without its weights: its class, and that its tokenizer, template and context length fit it
    and all prompts."""
    config, family = plan.config, plan.family
    folder = user_path(str(config.model.path))
    family.check_run(config)
    if config.model.path is not None and folder.is_dir():
        check_folder(folder, family.models)
        check_vocabulary(folder)
        check_class(folder, config.model.attention, family, shared=config.optimize.shared_prompts)
        longest_prompt(folder, plan)


def _check_critic(plan: RunPlan, path: str) -> None:
    config, family = plan.config, plan.family
    folder, base = critic_folder(path), user_path(str(config.model.path))
    shared = config.optimize.shared_prompts
    check_folder(folder, family.models, label="critic.path")
    check_class(folder, config.model.attention, family, critic=True, shared=shared)
    if config.model.path is not None and base.is_dir():
        check_critic(folder, base, family.models)


def check_scored(section: RewardSection, needs: Needs, config: RunConfig) -> None:
    """Check that a reward scores texts."""
    if needs.media not in ("samples", "texts"):
        raise ConfigError(
            f"rewards: '{section.slot}' scores {needs.media}, but model.policy '{config.model.policy}' makes texts. "
            "Choose a reward that reads those, or a custom function."
        )


def trial_text() -> np.ndarray:
    """Return one synthetic completion, (1,) objects."""
    return np.array(["a text that was made up for the trial"], object)


def cost_of_tokens(plan: RunPlan) -> Cost:
    """Return the cost of a run in rows: samples through the model."""
    config, requires, prompts = plan.config, plan.requires, plan.prompt_counts
    rollout, section = config.rollout, tokens_of(config)
    # Any engine also takes one forward over the whole text.
    drawing = section.max_new if section.engine.name == LOCAL else 0
    samples, turns = rollout.prompts_per_epoch * rollout.group_size, last_turn(config)
    groups = min(rollout.prompts_per_epoch, config.advantage.informative or rollout.prompts_per_epoch)
    trained = groups * (2 if requires.unit == "pair" else rollout.group_size)
    has_data = config.data is not None
    if has_data:
        samples = trained = samples_per_epoch(config)
    rows = trained * config.optimize.inner_epochs
    estimator = plan.estimator
    own_critic = requires.critic and config.critic.backbone == "own"
    stored = estimator.needs_reference
    splits = sum(1 for split in ("train", "heldout") if prompts[split])
    return Cost(
        prompts=prompts,
        samples_per_epoch=samples,
        # Samples that end early take fewer turns.
        rollout_forwards=0 if has_data else turns * samples * (drawing + 1),
        optimize_rows=rows,
        optimize_forwards=rows * (2 if own_critic else 1),
        # 0 if a stage stored them; otherwise cached in the first inner epoch.
        reference_forwards=trained * (requires.reference and not stored) + 2 * rows * requires.mismatched,
        value_forwards=samples * (int(estimator.needs_values) + int(stored)),
        evaluate_forwards=turns * splits * config.evaluate.samples * (section.max_new + 1),
        validate_forwards=heldout_samples(config) * (1 + requires.reference + 2 * requires.mismatched),
        updates=config.run.epochs * config.optimize.updates_per_epoch * config.optimize.inner_epochs,
        shards_per_epoch=0 if has_data else len(rollout_cuts(config)),
        latent_bytes_per_epoch=None,
        latent_bytes=None,
        stores_latents=False,
        evaluations=plan.evaluations,
        reference=requires.reference,
        drawing_forwards=turns * samples * _forwards_of_a_text(plan),
        depicting_forwards=turns * splits * config.evaluate.samples * _forwards_of_a_text(plan),
    )


def _forwards_of_a_text(plan: RunPlan) -> int:
    """Return the rows per text through the model that renders it, if there is one."""
    render = plan.config.render
    return 0 if render is None else render.images * render.steps * (2 if uses_guidance(plan.drawer.config) else 1)
