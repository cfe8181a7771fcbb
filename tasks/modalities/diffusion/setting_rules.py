"""Rules on settings that must fit together: sampler, plan, algorithm, group sizes, advantages.

Each rule is one function that refuses, before any work, a combination that would fail later, train nothing, or contain
a setting without effect. A rule reads the requirements and draws of components, never their names.
"""

from __future__ import annotations

from pathlib import Path

import torch

from configs.errors import ConfigError
from configs.registry import resolve
from configs.schema import RunConfig
from models.maths.transitions import Gaussian, Grid
from models.policies import KNOWN_LEVELS, NOISE_RANGE, POLICIES, modalities_of
from tasks.algorithms.checks import check_units
from tasks.inputs.prompts import uses_guidance
from tasks.modalities.diffusion.setting_combination import Combination

#: A noise std at or below this counts as no noise, because the log-prob divides by its square.
_NO_NOISE = 1e-6


def check_combination(found: Combination) -> None:
    """Check everything that depends on more than one component.

    Raises:
        ConfigError: two settings do not fit together.
    """
    for rule in (
        _transitions_need_noise_and_steps,
        _forward_data_needs_final_latents,
        _states_need_steps_after_them,
        _compared_samples_need_their_ends,
        _compared_samples_start_together,
        _sources_have_their_teachers,
        _trained_steps_need_noise,
        _densities_need_normalized_log_probs,
        _kl_rewards_need_a_chain,
        _average_needs_ema,
        lambda found: check_units(found.config, found.requires, found.group),
        _solver_fits_the_plan,
        _groups_are_large_enough,
        _levels_lie_on_the_schedule,
        _advantages_are_used,
        _advantages_mean_something,
        _prompts_are_not_shared,
        _stored_predictions_are_used,
        _guidance_that_is_left_out_is_there,
        _slopes_are_passed_over_once,
        _modalities_can_be_trained_apart,
    ):
        rule(found)


def _transitions_need_noise_and_steps(found: Combination) -> None:
    if found.requires.data != "transitions":
        return
    rollout = found.config.rollout
    if not found.kernel.stochastic:
        raise ConfigError(
            f"{found.algorithm} needs log-probs of stochastic steps, but rollout.sampler is "
            f"'{rollout.sampler.name}', which has no noise. Set rollout.sampler to 'flow_sde'."
        )
    if not found.trained:
        change = "Set rollout.plan to 'all'." if rollout.steps > 1 else "Raise rollout.steps."
        raise ConfigError(
            f"{found.algorithm} needs trained steps, but rollout.steps {rollout.steps} with {found.plan} trains none. "
            f"{change}"
        )


def _forward_data_needs_final_latents(found: Combination) -> None:
    if found.requires.data != "forward":
        return
    last = found.config.rollout.steps
    # A branch stores only its own step, so each must be the last step.
    kept = [min(steps.trained) + 1 == last if steps.branches else last in steps.states for steps in found.draws]
    if not all(kept):
        who = "them" if not any(kept) else "those of every sample"
        raise ConfigError(
            f"{found.algorithm} needs the final latents of a rollout, but {found.plan} does not store {who}. "
            "Set rollout.plan to 'final'."
        )


def _states_need_steps_after_them(found: Combination) -> None:
    if found.requires.data != "states":
        return
    latest = found.config.rollout.steps - found.requires.calls
    branches = found.draws[0].branches > 0
    if not branches and all(any(state <= latest for state in steps.states) for steps in found.draws):
        return
    lacks = "stores one step of each branch" if branches else f"stores none from 0 to {latest} of some samples"
    raise ConfigError(
        f"{found.algorithm} continues from stored states for {found.requires.calls} steps of rollout.steps "
        f"{found.config.rollout.steps}, but {found.plan} {lacks}. Set rollout.plan to {{name: late, options: {{low: "
        f"{max(0, latest)}, high: {max(0, latest) + 1}}}}}, or lower the algorithm's steps."
    )


def _compared_samples_need_their_ends(found: Combination) -> None:
    last = found.config.rollout.steps
    if not found.requires.finals or all(last in steps.states and not steps.branches for steps in found.draws):
        return
    raise ConfigError(
        f"{found.algorithm} compares the final latents of samples whose steps it trains, but {found.plan} does not "
        "store both. Set rollout.plan to {name: all, options: {keep_final: true}}."
    )


def _compared_samples_start_together(found: Combination) -> None:
    rollout = found.config.rollout
    if rollout.own_noise and not rollout.same_noise:
        raise ConfigError(
            f"rollout.own_noise is {rollout.own_noise}, which is a distance from the noise that a group shares, but "
            "rollout.same_noise is false. Set that to true, or remove rollout.own_noise."
        )
    if found.requires.same_noise and not rollout.same_noise:
        raise ConfigError(
            f"{found.algorithm} compares two samples that differ only by the noise after their common start, "
            "but rollout.same_noise is false. Set it to true."
        )


def _sources_have_their_teachers(found: Combination) -> None:
    taught = [name for name, _ in found.requires.teachers if name]
    sources = [source.name for source in found.config.prompts.sources]
    if not taught or set(taught) == set(sources):
        return
    there = f"are {', '.join(sources)}" if sources else "has none"
    raise ConfigError(
        f"{found.algorithm} has teachers for {', '.join(taught)}, but prompts.sources {there}: every prompt needs one. "
        "Give each source a teacher, or one to all with the option 'teacher'."
    )


def _trained_steps_need_noise(found: Combination) -> None:
    if not found.trained:
        return
    rollout, distribution = found.config.rollout, _schedule(found)
    quiet = [step for step in found.trained if not float(distribution.std[step]) > _NO_NOISE]
    if not quiet:
        return
    if not found.kernel.stochastic:
        remedy = "Set rollout.plan to 'final'."
    elif quiet == [rollout.steps - 1] and rollout.steps > 1:
        remedy = "Leave the last step out of the plan, or set rollout.sampler to 'flow_sde' or 'dance_sde'."
    else:
        remedy = "Change the sampler's noise option, or set rollout.sampler to 'flow_sde' or 'dance_sde'."
    raise ConfigError(
        f"{found.plan} trains step {quiet[0]} of rollout.steps {rollout.steps} (counted from 0), but rollout.sampler "
        f"'{rollout.sampler.name}' has no noise there (std {float(distribution.std[quiet[0]]):.1e}), and a step "
        f"without noise has no log-prob. {remedy}"
    )


def _densities_need_normalized_log_probs(found: Combination) -> None:
    if not found.requires.densities or _schedule(found).normalized:
        return
    raise ConfigError(
        f"{found.algorithm} with its options compares Gaussian densities, but rollout.sampler "
        f"'{found.config.rollout.sampler.name}' with log_prob 'squared' leaves their scale out, so the two do not "
        "belong to one ratio. Set rollout.sampler.options.log_prob to 'gaussian'."
    )


def _kl_rewards_need_a_chain(found: Combination) -> None:
    coefficient = found.config.advantage.kl_coef
    if coefficient > 0 and (found.draws[0].branches or not found.trained):
        raise ConfigError(
            f"advantage.kl_coef is {coefficient}, which needs a trained step in every sample's chain, but "
            f"{found.plan} has none or branches. Use the algorithm's own kl_coef instead."
        )


def _average_needs_ema(found: Combination) -> None:
    if found.requires.average and found.config.optimize.ema is None:
        raise ConfigError(
            f"{found.algorithm} is compared with the moving average of the weights, but optimize.ema is not set. "
            "Set optimize.ema, or kl_reference to 'base' or ema_kl_coef to 0."
        )


def _solver_fits_the_plan(found: Combination) -> None:
    solver = found.config.rollout.solver
    if solver != "euler" and any(steps.stochastic for steps in found.draws):
        raise ConfigError(
            f"rollout.solver '{solver}' remembers earlier steps, but {found.plan} adds noise between them. "
            "Set the solver to 'euler' or the plan to 'final'."
        )


def _groups_are_large_enough(found: Combination) -> None:
    needed = found.requires.min_group_size
    # With the mean over all prompts one sample per prompt is enough, unless the loss compares samples.
    if found.config.advantage.mean == "global" and found.requires.unit == "row":
        return
    if found.group < needed:
        raise ConfigError(
            f"rollout.group_size is {found.config.rollout.group_size}, but {found.algorithm} compares samples "
            f"of one prompt with each other, so all advantages would be 0. Set it to {needed} or more."
        )


def _levels_lie_on_the_schedule(found: Combination) -> None:
    times, family = found.requires.times, found.config.model.policy
    if times is None or not times.bounded or family not in KNOWN_LEVELS:
        return
    high, low = KNOWN_LEVELS[family]
    if times.low < low or times.high > high:
        raise ConfigError(
            f"{found.algorithm} noises latents to levels from {times.low} to {times.high}, but model.policy '{family}' "
            f"knows levels from {low} to {high} only. Set optimize.algorithm.options.times to "
            f"{{low: {max(times.low, low)}, high: {min(times.high, high)}}}, or its kind to 'grid'."
        )


def _advantages_are_used(found: Combination) -> None:
    if found.requires.advantages:
        return
    section = found.config.advantage
    settings = {
        "mode": section.mode if section.mode != "all" else None,
        "best_of": section.best_of,
        "threshold": section.threshold,
        "kl_coef": section.kl_coef or None,
        "soft_clip": section.soft_clip,
        "diversity": section.diversity,
    }
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(
                f"advantage.{name} is {value!r}, but {found.algorithm} does not read rewards, so it would do "
                f"nothing. Remove advantage.{name}."
            )


def _advantages_mean_something(found: Combination) -> None:
    section = found.config.advantage
    if all(reward.weight == 0 for reward in found.config.rewards):
        raise ConfigError(
            "rewards: every weight is 0, so all advantages would be 0 and nothing would be trained. Give one reward a "
            "weight, or move those that are only reported to evaluate.judges."
        )
    if section.best_of is not None and section.best_of > found.group:
        raise ConfigError(
            f"advantage.best_of is {section.best_of}, but groups have {found.group} samples, so all of them would be "
            f"kept. Lower it to {found.group // 2 * 2} or less, or remove it."
        )


def _schedule(found: Combination) -> Gaussian:
    """Return the sampler's steps over a schedule with the model's first and last level."""
    steps, ends = found.config.rollout.steps, _ends(found.config)
    sigmas = torch.linspace(*ends, steps + 1, dtype=torch.float64)
    nothing = torch.zeros(steps, 1, dtype=torch.float64)
    return found.kernel.step(nothing, nothing, Grid(sigmas[:-1], sigmas[1:], sigmas[1].expand(steps)))


def _ends(config: RunConfig) -> tuple[float, float]:
    """Return the first and last noise level of the family, 1 and 0 by default, or of the model folder's schedule."""
    model, folder = config.model, None if config.model.path is None else Path(config.model.path).expanduser()
    if model.policy not in NOISE_RANGE:
        return 1.0, 0.0
    if folder is None or not (folder / "model_index.json").is_file():
        return NOISE_RANGE[model.policy]
    family = resolve(POLICIES, model.policy, label="model.policy")
    high, low = family.noise_range(folder, config.rollout.steps)
    return high, low


def _stored_predictions_are_used(found: Combination) -> None:
    config = found.config
    if not config.rollout.unconditional:
        return
    without = {
        "there is no guidance by two forwards": not uses_guidance(config),
        "optimize.guidance_gradient is 'both'": config.optimize.guidance_gradient == "both",
        f"{found.algorithm} trains no stochastic steps": found.requires.data != "transitions",
        "optimize.replay trains rows of older policies": config.optimize.replay is not None,
        "with execution.ahead rollouts are made by an older policy": config.execution.ahead > 0,
    }
    for why, holds in without.items():
        if holds:
            raise ConfigError(f"rollout.unconditional has no use: {why}. Remove it.")


def _guidance_that_is_left_out_is_there(found: Combination) -> None:
    config = found.config
    is_chosen = "guided" in config.optimize.algorithm.options
    if found.requires.guided or not is_chosen or uses_guidance(config) or config.data is not None:
        return
    raise ConfigError(
        f"{found.algorithm} has the option guided: false, for a loss without the guidance of rollouts, but these have "
        f"none that could be left out: model.guidance_scale is {found.config.model.guidance_scale:g}, or an input of "
        "the model. Remove the option, or raise model.guidance_scale."
    )


def _modalities_can_be_trained_apart(found: Combination) -> None:
    config, named = found.config, [reward for reward in found.config.rewards if reward.modality is not None]
    known = modalities_of(config.model.policy) if named else ()
    for reward in named:
        if reward.modality not in known:
            there = f"have {' and '.join(known)}" if known else "have one modality"
            raise ConfigError(
                f"rewards: '{reward.slot}' judges the modality '{reward.modality}', but samples of model.policy "
                f"'{config.model.policy}' {there}. Remove 'modality', or name one there is."
            )
    if named and not found.requires.routes:
        raise ConfigError(
            f"rewards: '{named[0].slot}' judges a modality alone, but {found.algorithm} has one advantage for a whole "
            "sample. Choose 'grpo', 'grpo_guard', 'tempflow' or 'flash_grpo', or remove 'modality'."
        )
    older = {"optimize.replay": config.optimize.replay is not None, "execution.ahead": config.execution.ahead > 0}
    for setting, holds in older.items():
        if named and holds:
            raise ConfigError(
                f"rewards: '{named[0].slot}' judges a modality alone, but {setting} trains rows of older policies, "
                "whose log-probs are not recomputed by modality. Remove one of the two."
            )


def _prompts_are_not_shared(found: Combination) -> None:
    if found.config.optimize.shared_prompts:
        raise ConfigError(
            "optimize.shared_prompts is true, but the samples of a denoiser have no tokens of a prompt in them that a "
            "group could share. Remove it."
        )


def _slopes_are_passed_over_once(found: Combination) -> None:
    section = found.config.optimize
    again = {
        f"optimize.inner_epochs is {section.inner_epochs}": section.inner_epochs > 1,
        "optimize.replay trains samples of earlier epochs again": section.replay is not None,
    }
    for why, holds in again.items():
        if found.requires.once and holds:
            raise ConfigError(
                f"{found.algorithm} with its options follows a gradient that was taken where the samples are, but "
                f"{why}: each pass would go as far again, away from where the gradient holds. Pass over samples once, "
                "or set its target to 'bounded'."
            )
