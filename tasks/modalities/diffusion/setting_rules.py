"""Refuses settings that do not fit together: sampler, plan, algorithm, group sizes, advantages.

Each function yields, before any work, combinations that would fail later or train nothing.
They read the requirements and draws of components, never their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from flowmill.configs.model_families import spec_of
from flowmill.configs.refusals import Refusal, never_called, refuse
from flowmill.configs.user_directories import user_path
from flowmill.models.maths.transitions import Gaussian, Grid
from flowmill.models.policies import POLICIES
from flowmill.tasks.algorithms.checks import compared_rows
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.modalities.diffusion.engine_calls import check_engine
from flowmill.tasks.modalities.diffusion.setting_combination import Combination

#: A noise std at or below this counts as no noise, because the log-prob divides by its square.
_NO_NOISE = 1e-6


def check_combination(combination: Combination) -> None:
    """Check everything that depends on more than one component."""
    parts = (_uncalled, _plan, _states, _same_noise, _teachers, _sampler, _kl, _rows, _levels, _unconditional, _passes)
    refuse(combination.config, chain.from_iterable(part(combination) for part in parts))
    check_engine(combination)


def _uncalled(facts: Combination) -> Iterator[Refusal]:
    """Yield components of the user's own that nothing calls."""
    yield from never_called(facts.config, "rollout.tokens.engine", "denoisers draw no tokens")
    if not facts.requires.advantages:
        yield from never_called(facts.config, "advantage.estimator", f"{facts.algorithm} reads no rewards")


def _plan(facts: Combination) -> Iterator[Refusal]:
    requires, algorithm, plan, rollout = facts.requires, facts.algorithm, facts.plan, facts.config.rollout
    if requires.data == "transitions" and not facts.kernel.stochastic:
        yield Refusal(
            "rollout.sampler",
            f"rollout.sampler is '{rollout.sampler.name}', which has no noise",
            "Set rollout.sampler to 'flow_sde'",
            f"{algorithm} needs log-probs of stochastic steps, but",
        )
    if requires.data == "transitions" and not facts.trained:
        yield Refusal(
            "rollout.steps",
            f"rollout.steps {rollout.steps} with {plan} trains none",
            "Set rollout.plan to 'all'" if rollout.steps > 1 else "Raise rollout.steps",
            f"{algorithm} needs trained steps, but",
        )
    if requires.data == "forward" and not all(facts.stores_ends):
        yield Refusal(
            "rollout.plan",
            f"{plan} does not store {'those of every sample' if any(facts.stores_ends) else 'them'}",
            "Set rollout.plan to 'final'",
            f"{algorithm} needs the final latents of a rollout, but",
        )
    if requires.finals and any(each.branches or rollout.steps not in each.states for each in facts.draws):
        yield Refusal(
            "rollout.plan",
            f"{plan} does not store both",
            "Set rollout.plan to {name: all, options: {keep_final: true}}",
            f"{algorithm} compares the final latents of samples whose steps it trains, but",
        )


def _states(facts: Combination) -> Iterator[Refusal]:
    steps, calls, branches = facts.config.rollout.steps, facts.requires.calls, facts.draws[0].branches
    latest, low = steps - calls, max(0, steps - calls)
    stored = all(any(state <= latest for state in each.states) for each in facts.draws)
    if facts.requires.data == "states" and (branches or not stored):
        lacks = "stores one step of each branch" if branches else f"stores none from 0 to {latest} of some samples"
        yield Refusal(
            "rollout.plan",
            f"{facts.plan} {lacks}",
            f"Set rollout.plan to {{name: late, options: {{low: {low}, high: {low + 1}}}}}, or lower the algorithm's "
            "steps",
            f"{facts.algorithm} continues from stored states for {calls} steps of rollout.steps {steps}, but",
        )


def _same_noise(facts: Combination) -> Iterator[Refusal]:
    """Yield samples of a group that do not share their noise."""
    rollout = facts.config.rollout
    if rollout.own_noise and not rollout.same_noise:
        yield Refusal(
            "rollout.own_noise",
            "rollout.same_noise is false",
            "Set that to true, or remove rollout.own_noise",
            f"rollout.own_noise is {rollout.own_noise}, which is a distance from the noise that a group shares, but",
        )
    stochastic = facts.kernel.stochastic and any(each.stochastic for each in facts.draws)
    equal = rollout.same_noise and not (rollout.own_noise or stochastic) and facts.config.data is None
    if equal and not _trains_equal_samples(facts):
        yield Refusal(
            "rollout.same_noise",
            f"{facts.plan} with rollout.sampler '{rollout.sampler.name}' adds no noise later: all samples of a group "
            "would be equal, and none would be trained on",
            "Set it to false, or set rollout.own_noise",
            "rollout.same_noise is true, but",
        )
    if facts.requires.same_noise and not rollout.same_noise:
        yield Refusal(
            "rollout.same_noise",
            "rollout.same_noise is false",
            "Set it to true",
            f"{facts.algorithm} compares two samples that differ only by the noise after their common start, but",
        )


def _trains_equal_samples(facts: Combination) -> bool:
    """Return whether samples are trained on that equal all others of their group."""
    requires, advantage = facts.requires, facts.config.advantage
    if not (requires.advantages or requires.desired) or advantage.estimator.name != "group":
        return True
    # Rewards are also compared with those of other prompts, or of the prompt's earlier samples.
    others = advantage.mean == "global" or advantage.std == "running"
    return (others and requires.unit != "pair") or (requires.zero_advantages and not requires.desired)


def _teachers(facts: Combination) -> Iterator[Refusal]:
    taught = [name for name, _ in facts.requires.teachers if name]
    sources = [source.name for source in facts.config.prompts.sources]
    if taught and set(taught) != set(sources):
        yield Refusal(
            "prompts.sources",
            f"prompts.sources {'are ' + ', '.join(sources) if sources else 'has none'}: every prompt needs one",
            "Give each source a teacher, or one to all with the option 'teacher'",
            f"{facts.algorithm} has teachers for {', '.join(taught)}, but",
        )


def _sampler(facts: Combination) -> Iterator[Refusal]:
    """Yield samplers whose steps have no log-prob, or one of another scale."""
    sampler, last = facts.config.rollout.sampler.name, facts.config.rollout.steps - 1
    stds = _schedule(facts).std.tolist() if facts.trained else []
    quiet = [step for step in facts.trained if not stds[step] > _NO_NOISE]
    if quiet:
        remedy = "Change the sampler's noise option, or set rollout.sampler to 'flow_sde' or 'dance_sde'"
        if not facts.kernel.stochastic:
            remedy = "Set rollout.plan to 'final'"
        elif quiet == [last] and last:
            remedy = "Leave the last step out of the plan, or set rollout.sampler to 'flow_sde' or 'dance_sde'"
        yield Refusal(
            "rollout.sampler",
            f"rollout.sampler '{sampler}' has no noise there (std {stds[quiet[0]]:.1e}), and a step without "
            "noise has no log-prob",
            remedy,
            f"{facts.plan} trains step {quiet[0]} of rollout.steps {last + 1} (counted from 0), but",
        )
    if ":" in sampler and not any(steps.stochastic for steps in facts.draws):
        yield Refusal(
            "rollout.sampler",
            f"no step of {facts.plan} has noise, so it would never be called",
            "Remove it, or choose another plan",
            f"rollout.sampler is '{sampler}', but",
        )
    if facts.requires.densities and not _schedule(facts).normalized:
        yield Refusal(
            "rollout.sampler",
            f"rollout.sampler '{sampler}' with log_prob 'squared' leaves their scale out, so the two do not belong to "
            "one ratio",
            "Set rollout.sampler.options.log_prob to 'gaussian'",
            f"{facts.algorithm} with its options compares Gaussian densities, but",
        )


def _kl(facts: Combination) -> Iterator[Refusal]:
    """Yield KLs without the steps or weights that they are measured by."""
    coefficient = facts.config.advantage.kl_coef
    if coefficient > 0 and (facts.draws[0].branches or not facts.trained):
        yield Refusal(
            "advantage.kl_coef",
            f"{facts.plan} has none or branches",
            "Use the algorithm's own kl_coef instead",
            f"advantage.kl_coef is {coefficient}, which needs a trained step in every sample's chain, but",
        )
    if facts.requires.average and facts.config.optimize.ema is None:
        yield Refusal(
            "optimize.algorithm",
            "optimize.ema is not set",
            "Set optimize.ema, or kl_reference to 'base' or ema_kl_coef to 0",
            f"{facts.algorithm} is compared with the moving average of the weights, but",
        )


def _rows(facts: Combination) -> Iterator[Refusal]:
    """Yield sizes, solvers and weights with which rows cannot be compared."""
    config, requires, solver = facts.config, facts.requires, facts.config.rollout.solver
    yield from compared_rows(facts)
    if solver != "euler" and any(steps.stochastic for steps in facts.draws):
        yield Refusal(
            "rollout.solver",
            f"{facts.plan} adds noise between them",
            "Set the solver to 'euler' or the plan to 'final'",
            f"rollout.solver {solver!r} remembers earlier steps, but",
        )
    # With the mean over all prompts one sample per prompt is enough, unless the loss compares samples.
    least = requires.min_group_size
    if facts.group < least and (config.advantage.mean != "global" or requires.unit != "row"):
        yield Refusal(
            "rollout.group_size",
            f"{facts.algorithm} compares samples of one prompt with each other, so all advantages would be 0",
            f"Set it to {least} or more",
        )
    if all(reward.weight == 0 for reward in config.rewards):
        yield Refusal(
            "rewards",
            "all advantages would be 0 and nothing would be trained",
            "Give one reward a weight, or move those that are only reported to evaluate.judges",
            "rewards: every weight is 0, so",
        )


def _levels(facts: Combination) -> Iterator[Refusal]:
    """Yield families that were not trained on the levels that the algorithm draws."""
    family, times = facts.config.model.policy, facts.requires.times
    levels = spec_of(family).known_levels
    if times is None:
        return
    if levels is not None and times.bounded and not levels[1] <= times.low <= times.high <= levels[0]:
        low, high = max(times.low, levels[1]), min(times.high, levels[0])
        yield Refusal(
            "model.policy",
            f"model.policy '{family}' knows levels from {levels[1]} to {levels[0]} only",
            f"Set optimize.algorithm.options.times to {{low: {low}, high: {high}}}, or its kind to 'timesteps'",
            f"{facts.algorithm} noises latents to levels from {times.low} to {times.high}, but",
        )
    own = None if family in POLICIES else facts.family
    if times.kind == "timesteps" and levels is None and not hasattr(own, "trained_levels"):
        yield Refusal(
            "model.policy",
            f"model.policy '{family}' was trained on all levels",
            "Set its kind to 'stratified' or 'logit_normal'",
            f"{facts.algorithm} draws levels from the timesteps of a training (times.kind 'timesteps'), but",
        )


def _unconditional(facts: Combination) -> Iterator[Refusal]:
    """Yield settings of guidance where there is none."""
    config, guidance = facts.config, facts.config.model.guidance_scale
    for without, why in (
        (not uses_guidance(config), "there is no guidance by two forwards"),
        (config.optimize.guidance_gradient == "both", "optimize.guidance_gradient is 'both'"),
        (facts.requires.data != "transitions", f"{facts.algorithm} trains no stochastic steps"),
        (config.optimize.replay is not None, "optimize.replay trains rows of older policies"),
        (config.execution.ahead > 0, "with execution.ahead rollouts are made by an older policy"),
    ):
        if config.rollout.unconditional and without:
            yield Refusal("rollout.unconditional", why, "Remove it", "rollout.unconditional has no use:")
    without = not facts.requires.guided and config.data is None and not uses_guidance(config)
    if "guided" in config.optimize.algorithm.options and without:
        yield Refusal(
            "optimize.algorithm",
            f"these have none that could be left out: model.guidance_scale is {guidance:g}, or an input of the model",
            "Remove the option, or raise model.guidance_scale",
            f"{facts.algorithm} has the option guided: false, for a loss without the guidance of rollouts, but",
        )


def _passes(facts: Combination) -> Iterator[Refusal]:
    """Yield further passes of an algorithm whose gradient holds for one."""
    count, replay = facts.config.optimize.inner_epochs, facts.config.optimize.replay
    for setting, repeated, cause in (
        ("optimize.inner_epochs", count > 1, f"optimize.inner_epochs is {count}"),
        ("optimize.replay", replay is not None, "optimize.replay trains samples of earlier epochs again"),
    ):
        if facts.requires.once and repeated:
            yield Refusal(
                setting,
                f"{cause}: each pass would go as far again, away from where the gradient holds",
                "Pass over samples once, or set its target to 'bounded'",
                f"{facts.algorithm} with its options follows a gradient that was taken where the samples are, but",
            )


def _schedule(combination: Combination) -> Gaussian:
    """Return the sampler's steps over a schedule with the model's first and last level."""
    steps, ends = combination.config.rollout.steps, _ends(combination)
    sigmas = torch.linspace(*ends, steps + 1, dtype=torch.float64)
    nothing = torch.zeros(steps, 1, dtype=torch.float64)
    return combination.kernel.step(nothing, nothing, Grid(sigmas[:-1], sigmas[1:], sigmas[1].expand(steps)))


def _ends(facts: Combination) -> tuple[float, float]:
    """Return the first and last noise level of the family, 1 and 0 by default, or of the model folder's schedule."""
    model = facts.config.model
    folder = None if model.path is None else user_path(model.path)
    if (ends := spec_of(model.policy).noise_range) is None:
        return 1.0, 0.0
    if folder is None or not (folder / "model_index.json").is_file():
        return ends
    high, low = facts.family.noise_range(folder, facts.config.rollout.steps)
    return high, low
