"""Checks the configs of causal language models, and counts the cost of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowmill.configs.errors import ConfigError
from flowmill.configs.execution import ExecutionSection
from flowmill.configs.refusals import Rule, never_called, refuse
from flowmill.configs.registry import resolve
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.engines import LOCAL, make_engine
from flowmill.models.memory.language_architectures import check_class
from flowmill.models.policies import POLICIES
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.language_model_folders import check_critic, check_folder, check_vocabulary
from flowmill.models.rewards.base import Needs
from flowmill.tasks.advantages.estimators import Estimator, make_estimator
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.algorithms.checks import UNITS, Trained, check_advantage, check_replay
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.inputs.data_section import heldout_samples, samples_per_epoch
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.inputs.renderer import renderer_config
from flowmill.tasks.inputs.source_prompts import source_prompts
from flowmill.tasks.inputs.weight_sources import critic_folder
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.modalities.tokens.run_prompts import longest_prompt
from flowmill.tasks.runs.sharding import rollout_cuts
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.specs.turns import last_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts(Trained):
    """A config of samples of tokens."""

    @property
    def estimator(self) -> Estimator:
        """The estimator of advantages."""
        return make_estimator(self.config)


#: Texts of several rules.
_ESTIMATOR = "{setting} is '{value.name}', but"
_HEAD = "with critic.backbone 'policy' the critic is a head on the policy's hidden states"

TOKENS: tuple[Rule[Texts], ...] = (
    never_called("rollout.sampler rollout.plan rollout.solver rollout.engine evaluate.solver",
                 "texts are drawn token by token, without it"),
    Rule("execution.sampling", lambda f, sampling: sampling == "spread" or f.config.execution.context_parallel > 1,
         "split denoisers",
         "Remove them", where="execution.context_parallel and execution.sampling 'spread'"),
    Rule("advantage.kl_coef", lambda f, coefficient: coefficient > 0,
           "which texts' do not",
           "Use the algorithm's kl_coef", where="{setting} is for KLs that rollouts store,"),
    Rule("rollout.group_size", lambda f, _: f.group < f.requires.min_group_size,
         "{facts.algorithm} compares {facts.requires.min_group_size} completions or more",
         "Raise it"),
    Rule("advantage.estimator", lambda f, _: f.requires.critic and not f.estimator.needs_values,
         "{facts.algorithm} trains a critic, and only 'gae' reads one's values",
         "Set advantage.estimator to 'gae'", where=_ESTIMATOR),
    Rule("advantage.estimator", lambda f, _: f.estimator.needs_values and not f.requires.critic,
         "{facts.algorithm} trains no critic, and only 'gae' reads one's values",
         "Set advantage.estimator to 'group', or choose the algorithm 'ppo'", where=_ESTIMATOR),
    Rule("advantage.estimator", lambda f, _: f.requires.per_token and not f.estimator.per_token,
         "{facts.algorithm} takes advantages of tokens",
         "Remove it to use the algorithm's own", where=_ESTIMATOR),
    Rule("advantage.estimator", lambda f, _: f.estimator.per_token and f.requires.normalization,
         "{facts.algorithm} is defined with advantages of samples",
         "Set advantage.estimator to 'group', or choose 'grpo', which takes any", where=_ESTIMATOR),
    Rule("advantage.estimator", lambda f, _: f.estimator.per_token and f.requires.unit != "row",
         "{facts.algorithm} compares whole samples",
         "Set advantage.estimator to 'group'", where=_ESTIMATOR),
    Rule("optimize.algorithm",
         lambda f, algorithm: algorithm.options.get("kl_coef", 0.0) and getattr(f.estimator, "kl_coef", 0.0),
         "{facts.algorithm} has {value.options[kl_coef]}: the KL would count twice, in the reward and in the loss",
         "Set one of them to 0",
         where="advantage.estimator '{advantage.estimator.name}' has kl_coef {found} and"),
    Rule("rollout.tokens.engine",
         lambda f, engine: make_engine(engine).reloads and _processes_apart(f.config.execution),
         "rollouts are made by several independent processes, and one would change the weights that another draws "
         "with",
         "Set execution.processes to 1 and execution.runner to 'threads', or execution.strategy to 'fsdp'",
         where="{setting} brings weights to a server (option 'folder'), but"),
    Rule("rollout.tokens.rescore", lambda f, on: not on and tokens_of(f.config).engine.name != LOCAL,
           "rollout.tokens.engine '{rollout.tokens.engine.name}' draws with kernels of its own, from which ratios "
           "would be biased",
           "Remove rollout.tokens.rescore", where="{setting} is false, but"),
    Rule("rollout.tokens.rescore", lambda f, on: not on and f.config.model.dtype != "float32",
           "with model.dtype '{model.dtype}' log-probs with a KV cache differ from those of training by up to 1e-2",
           "Remove rollout.tokens.rescore, or set model.dtype to 'float32'", where="{setting} is false, but"),
)  # fmt: skip

CRITIC: tuple[Rule[Texts], ...] = (
    Rule("critic.log_probs", lambda f, on: on and f.config.critic.backbone == "policy",
           f"{_HEAD}, and reads no tokens",
           "Set critic.backbone to 'own', or remove critic.log_probs", where="{setting} is true, but"),
    Rule("critic.path critic.device", lambda f, _: f.config.critic.backbone == "policy",
         f"{_HEAD}, where those are",
         "Set critic.backbone to 'own', or remove it"),
    Rule("critic.device", lambda f, _: f.config.execution.ranks > 1,
         "execution has {execution.ranks} processes, each with its own device",
         "Remove it, or set execution.processes to 1"),
    Rule("advantage",
         lambda f, own: [(at, value, getattr(own, at)) for at, value in f.requires.normalization
                         if getattr(own, at) != value],
         "{facts.algorithm} is defined with '{found[0][1]}'",
         "Set advantage.{found[0][0]} to '{found[0][1]}', or choose 'grpo', which takes any",
         where="advantage.{found[0][0]} is '{found[0][2]}', but"),
)  # fmt: skip

ROWS: tuple[Rule[Texts], ...] = (
    *UNITS,
    Rule("optimize.replay.steps", lambda *_: True,
         "a text is one row of training, without steps",
         "Remove {setting}"),
)  # fmt: skip


def check_tokens(config: RunConfig, requires: Requirements) -> None:
    """Check the settings of samples of tokens."""
    facts = Texts(config=config, requires=requires)
    refuse(TOKENS, facts)
    _check_base(config)
    _check_prompts(config)
    refuse(CRITIC, facts)
    if config.critic.path is not None:
        _check_critic(config, config.critic.path)
    check_advantage(config)
    refuse(ROWS, facts)
    check_replay(config, requires, None)


def _processes_apart(execution: ExecutionSection) -> bool:
    """Return whether several processes sample independently."""
    several = execution.processes * execution.nodes > 1 and execution.strategy != "fsdp"
    return several or execution.runner.name != "threads"


def _check_base(config: RunConfig) -> None:
    """Check a local model without its weights: its class, and that its tokenizer fits it."""
    folder, family = Path(str(config.model.path)).expanduser(), _family(config)
    family.check_run(config)
    if config.model.path is not None and folder.is_dir():
        check_folder(folder, family.models)
        check_vocabulary(folder)
        check_class(folder, config.model.attention, family, shared=config.optimize.shared_prompts)


def _family(config: RunConfig) -> type[CausalLM]:
    family: type[CausalLM] = resolve(POLICIES, config.model.policy, label="model.policy")
    return family


def _check_prompts(config: RunConfig) -> None:
    """Check that a local model's tokenizer, template and context length support all prompts."""
    folder = Path(str(config.model.path)).expanduser()
    if config.model.path is not None and folder.is_dir():
        longest_prompt(folder, config, source_prompts(config))


def _check_critic(config: RunConfig, path: str) -> None:
    """Check the critic's initial model."""
    folder, base = critic_folder(path), Path(str(config.model.path)).expanduser()
    family, shared = _family(config), config.optimize.shared_prompts
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


def cost_of_tokens(config: RunConfig, requires: Requirements, prompts: Mapping[str, int]) -> Cost:
    """Return the cost of a run in rows: samples through the model."""
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
    estimator = make_estimator(config)
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
