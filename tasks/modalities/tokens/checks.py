"""Checks the configs of causal language models, and counts the cost of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from configs.advantages import ReplaySection
from configs.algorithm_defaults import FORWARD
from configs.base import Section
from configs.errors import ConfigError
from configs.model import ModelSection
from configs.refusals import refuse
from configs.registry import resolve
from configs.rewards import RewardSection
from configs.schema import EvaluateSection, OptimizeSection, RolloutSection, RunConfig
from models.engines import LOCAL, make_engine
from models.memory.language_architectures import check_class
from models.policies import POLICIES
from models.policies.causal_lm import CausalLM
from models.policies.language_model_folders import check_critic, check_folder, check_vocabulary
from models.rewards.base import Needs
from tasks.advantages.estimators import make_estimator
from tasks.algorithms.base import Requirements
from tasks.algorithms.checks import UNITS, Trained, check_advantage, check_replay
from tasks.inputs.components import tokens_of
from tasks.inputs.given_data import given_heldout, given_per_epoch
from tasks.inputs.prompts import uses_guidance
from tasks.inputs.renderer import renderer_config
from tasks.inputs.source_prompts import source_prompts
from tasks.inputs.weight_sources import critic_folder
from tasks.modalities.forward_cost import Cost
from tasks.modalities.tokens.run_prompts import longest_prompt
from tasks.runs.sharding import rollout_cuts
from tasks.specs.plan import RunPlan
from tasks.specs.turns import last_turn

Foreign = Mapping[str, tuple[type[Section], tuple[str, ...]]]
#: Settings without a meaning for texts, by section; each must have its default.
FOREIGN: Foreign = {
    "model": (
        ModelSection,
        ("height", "width", "frames", "guidance_scale", "negative_prompt", "vae_tiling", "device_map", "compile"),
    ),
    "rollout": (
        RolloutSection,
        tuple("steps sampler solver plan same_noise own_noise latents_dtype unconditional media engine".split()),
    ),
    "optimize": (OptimizeSection, ("guidance_gradient",)),
    "evaluate": (EvaluateSection, ("steps", "solver", "height", "width", "frames")),
}


def check_tokens(
    config: RunConfig, requires: Requirements, *, foreign: Foreign = FOREIGN, makes: str = "texts"
) -> None:
    """Check the settings of samples of tokens, and that settings of other kinds are not used.

    Args:
        config: the config.
        requires: its algorithm's needs.
        foreign: settings of other kinds.
        makes: the samples, in the plural.

    Raises:
        ConfigError: a setting or combination is invalid.
    """
    for name, (section, fields) in foreign.items():
        for field in fields:
            value, default = getattr(getattr(config, name), field), section.model_fields[field].get_default()
            # The default may come from the image algorithm with the same name.
            followed = field == "plan" and config.optimize.algorithm.name in FORWARD and value.name == "final"
            if value != default and not followed:
                raise ConfigError(
                    f"{name}.{field} is {value!r}, but model.policy '{config.model.policy}' makes {makes}, for which "
                    f"it means nothing. Remove it; rollout.tokens says how {makes} are sampled."
                )
    if config.execution.context_parallel > 1 or config.execution.sampling == "spread":
        raise ConfigError("execution.context_parallel and execution.sampling 'spread' split denoisers. Remove them.")
    if config.advantage.kl_coef > 0:
        raise ConfigError(
            "advantage.kl_coef is for KLs that rollouts store, which texts' do not. Use the algorithm's kl_coef."
        )
    if config.samples_per_group < requires.min_group_size:
        raise ConfigError(
            f"rollout.group_size is {config.rollout.group_size}, but optimize.algorithm "
            f"'{config.optimize.algorithm.name}' compares {requires.min_group_size} completions or more. Raise it."
        )
    if config.optimize.shared_prompts and config.samples_per_group == 1:
        raise ConfigError(
            "optimize.shared_prompts is true, but a group has one text, whose prompt no other shares. Remove it."
        )
    _check_estimator(config, requires)
    _check_engine(config)
    _check_rescore(config)
    _check_base(config)
    _check_prompts(config)
    _check_critic(config)
    for name, value in requires.normalization:
        found = getattr(config.advantage, name)
        if found != value:
            raise ConfigError(
                f"advantage.{name} is '{found}', but optimize.algorithm '{config.optimize.algorithm.name}' is defined "
                f"with '{value}'. Set advantage.{name} to '{value}', or choose 'grpo', which takes any."
            )
    check_advantage(config)
    refuse(UNITS, Trained(config=config, requires=requires))
    _check_rows(config)
    check_replay(config, requires, None)


def _check_rows(config: RunConfig) -> None:
    """Check that no setting of a sample's steps is used: a text is one row."""
    replay = config.optimize.replay
    for name in ("steps", "level") if replay is not None else ():
        value = getattr(replay, name)
        if value != ReplaySection.model_fields[name].default:
            raise ConfigError(
                f"optimize.replay.{name} is {value!r}, but a text is one row of training, without steps. Remove "
                f"optimize.replay.{name}."
            )


def _check_engine(config: RunConfig) -> None:
    """Check the engine, and that only one process sends it weights."""
    engine = make_engine(tokens_of(config).engine)
    execution = config.execution
    apart = execution.processes * execution.nodes > 1 and execution.strategy != "fsdp"
    if engine.reloads and (apart or execution.runner.name != "threads"):
        raise ConfigError(
            "rollout.tokens.engine brings weights to a server (option 'folder'), but rollouts are made by several "
            "independent processes, and one would change the weights that another draws with. Set "
            "execution.processes to 1 and execution.runner to 'threads', or execution.strategy to 'fsdp'."
        )


def _check_rescore(config: RunConfig) -> None:
    """Check that ``rescore`` is only off where the engine's log-probs are accurate enough for training."""
    section, dtype = tokens_of(config), config.model.dtype
    if section.rescore:
        return
    if section.engine.name != LOCAL:
        raise ConfigError(
            f"rollout.tokens.rescore is false, but rollout.tokens.engine '{section.engine.name}' draws with kernels of "
            "its own, from which ratios would be biased. Remove rollout.tokens.rescore."
        )
    if dtype != "float32":
        raise ConfigError(
            f"rollout.tokens.rescore is false, but with model.dtype '{dtype}' log-probs with a KV cache differ from "
            "those of training by up to 1e-2. Remove rollout.tokens.rescore, or set model.dtype to 'float32'."
        )


def _check_base(config: RunConfig) -> None:
    """Check a local model without its weights: its class, and that its tokenizer fits it."""
    folder, family = Path(str(config.model.path)).expanduser(), _family(config)
    family.check_run(config)
    if config.model.path is not None and folder.is_dir():
        check_folder(folder, family.models)
        check_vocabulary(folder)
        check_class(folder, config.model.attention, family, shared=config.optimize.shared_prompts)


def _family(config: RunConfig) -> type[CausalLM]:
    found: type[CausalLM] = resolve(POLICIES, config.model.policy, label="model.policy")
    return found


def _check_prompts(config: RunConfig) -> None:
    """Check that a local model's tokenizer, template and context length support all prompts."""
    folder = Path(str(config.model.path)).expanduser()
    if config.model.path is not None and folder.is_dir():
        longest_prompt(folder, config, source_prompts(config))


def _check_critic(config: RunConfig) -> None:
    """Check the critic's inputs, its initial model and its device."""
    section, execution = config.critic, config.execution
    if section.log_probs and section.backbone == "policy":
        raise ConfigError(
            "critic.log_probs is true, but with critic.backbone 'policy' the critic is a head on the policy's hidden "
            "states, and reads no tokens. Set critic.backbone to 'own', or remove critic.log_probs."
        )
    elsewhere = next((name for name in ("path", "device") if getattr(section, name) is not None), None)
    if elsewhere is None:
        return
    if section.backbone == "policy":
        raise ConfigError(
            f"critic.{elsewhere} is '{getattr(section, elsewhere)}', but with critic.backbone 'policy' the critic is a "
            f"head on the policy's hidden states, where those are. Set critic.backbone to 'own', or remove it."
        )
    if section.device is not None and execution.ranks > 1:
        raise ConfigError(
            f"critic.device is '{section.device}', but execution has {execution.ranks} processes, each with its own "
            "device. Remove it, or set execution.processes to 1."
        )
    if section.path is not None:
        folder, base = critic_folder(section.path), Path(str(config.model.path)).expanduser()
        family, shared = _family(config), config.optimize.shared_prompts
        check_folder(folder, family.models, label="critic.path")
        check_class(folder, config.model.attention, family, critic=True, shared=shared)
        if config.model.path is not None and base.is_dir():
            check_critic(folder, base, family.models)


def _check_estimator(config: RunConfig, requires: Requirements) -> None:
    """Check that the estimator fits the algorithm: a critic, and advantages of tokens or samples."""
    algorithm, estimator = config.optimize.algorithm.name, config.advantage.estimator.name
    made = make_estimator(config)
    if made.needs_values != requires.critic:
        needs = "trains a critic" if requires.critic else "trains no critic"
        other = "'gae'" if requires.critic else "'group', or choose the algorithm 'ppo'"
        raise ConfigError(
            f"advantage.estimator is '{estimator}', but optimize.algorithm '{algorithm}' {needs}, and only 'gae' reads "
            f"one's values. Set advantage.estimator to {other}."
        )
    if requires.per_token and not made.per_token:
        raise ConfigError(
            f"advantage.estimator is '{estimator}', but optimize.algorithm '{algorithm}' takes advantages of tokens. "
            "Remove it to use the algorithm's own."
        )
    if made.per_token and requires.normalization:
        raise ConfigError(
            f"advantage.estimator is '{estimator}', but optimize.algorithm '{algorithm}' is defined with advantages of "
            "samples. Set advantage.estimator to 'group', or choose 'grpo', which takes any."
        )
    if made.per_token and requires.unit != "row":
        raise ConfigError(
            f"advantage.estimator is '{estimator}', but optimize.algorithm '{algorithm}' compares whole samples. Set "
            "advantage.estimator to 'group'."
        )
    reward_kl = getattr(made, "kl_coef", 0.0)
    loss_kl = config.optimize.algorithm.options.get("kl_coef", 0.0)
    if reward_kl and loss_kl:
        raise ConfigError(
            f"advantage.estimator '{estimator}' has kl_coef {reward_kl} and optimize.algorithm '{algorithm}' has "
            f"{loss_kl}: the KL would count twice, in the reward and in the loss. Set one of them to 0."
        )


def check_scored(section: RewardSection, needs: Needs, config: RunConfig) -> None:
    """Check that a reward scores texts.

    Raises:
        ConfigError: it scores other media.
    """
    if needs.media not in ("samples", "texts"):
        raise ConfigError(
            f"rewards: '{section.slot}' scores {needs.media}, but model.policy '{config.model.policy}' makes texts. "
            "Choose a reward that reads those, or a custom function."
        )


def trial_text() -> np.ndarray:
    """Return one synthetic completion, (1,) objects."""
    return np.array(["a text that was made up for the trial"], object)


def cost_of_tokens(config: RunConfig, requires: Requirements, prompts: Mapping[str, int]) -> Cost:
    """Return the cost of a run in rows: samples through the model."""
    rollout, section = config.rollout, tokens_of(config)
    # Any engine also takes one forward over the whole text.
    drawing = section.max_new if section.engine.name == LOCAL else 0
    samples, turns = rollout.prompts_per_epoch * rollout.group_size, last_turn(config)
    groups = min(rollout.prompts_per_epoch, config.advantage.informative or rollout.prompts_per_epoch)
    trained = groups * (2 if requires.unit == "pair" else rollout.group_size)
    given = config.data is not None
    if given:
        samples = trained = given_per_epoch(config)
    rows = trained * config.optimize.inner_epochs
    estimator = make_estimator(config)
    own_critic = requires.critic and config.critic.backbone == "own"
    stored = estimator.needs_reference
    splits = sum(1 for split in ("train", "heldout") if prompts[split])
    return Cost(
        prompts=prompts,
        samples_per_epoch=samples,
        # Samples that end early take fewer turns.
        rollout_forwards=0 if given else turns * samples * (drawing + 1),
        optimize_rows=rows,
        optimize_forwards=rows * (2 if own_critic else 1),
        # 0 if a stage stored them; otherwise cached in the first inner epoch.
        reference_forwards=trained if requires.reference and not stored else 0,
        value_forwards=samples * (int(estimator.needs_values) + int(stored)),
        evaluate_forwards=turns * splits * config.evaluate.samples * (section.max_new + 1),
        validate_forwards=given_heldout(config) * (1 + requires.reference),
        updates=config.run.epochs * config.optimize.updates_per_epoch * config.optimize.inner_epochs,
        shards_per_epoch=0 if given else len(rollout_cuts(config)),
        latent_bytes_per_epoch=None,
        latent_bytes=None,
        stores_latents=False,
        evaluations=RunPlan(config).evaluations,
        reference=requires.reference,
        drawing_forwards=turns * samples * _forwards_of_a_text(config),
        depicting_forwards=turns * splits * config.evaluate.samples * _forwards_of_a_text(config),
    )


def _forwards_of_a_text(config: RunConfig) -> int:
    """Return the rows per text through the model that renders it, if there is one."""
    if config.render is None:
        return 0
    return config.render.images * config.render.steps * (2 if uses_guidance(renderer_config(config)) else 1)
