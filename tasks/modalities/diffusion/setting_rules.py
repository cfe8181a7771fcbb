"""Rules on settings that must fit together: sampler, plan, algorithm, group sizes, advantages.

Each refuses, before any work, a combination that would fail later or train nothing.
A rule reads the requirements and draws of components, never their names.
"""

from __future__ import annotations

from pathlib import Path

import torch

from flowmill.configs.refusals import Rule, never_called, refuse
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.transitions import Gaussian, Grid
from flowmill.models.policies import KNOWN_LEVELS, NOISE_RANGE, POLICIES
from flowmill.tasks.algorithms.checks import UNITS
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.modalities.diffusion.engine_calls import check_engine
from flowmill.tasks.modalities.diffusion.setting_combination import Combination

#: A noise std at or below this counts as no noise, because the log-prob divides by its square.
_NO_NOISE = 1e-6
#: Texts of several rules.
_NO_USE = "{setting} has no use:"
_FOLLOWS = "{facts.algorithm} with its options follows a gradient that was taken where the samples are, but"
_AS_FAR = "each pass would go as far again, away from where the gradient holds"
_PASS_ONCE = "Pass over samples once, or set its target to 'bounded'"

COMBINATION: tuple[Rule[Combination], ...] = (
    never_called("rollout.tokens.engine", "denoisers draw no tokens"),
    never_called("advantage.estimator", "{facts.algorithm} reads no rewards", lambda f: not f.requires.advantages),
    Rule("rollout.sampler", lambda f, _: f.requires.data == "transitions" and not f.kernel.stochastic,
         "rollout.sampler is '{value.name}', which has no noise",
         "Set rollout.sampler to 'flow_sde'", where="{facts.algorithm} needs log-probs of stochastic steps, but"),
    Rule("rollout.steps",
         lambda f, steps: f.requires.data == "transitions" and not f.trained and
         ("Set rollout.plan to 'all'" if steps > 1 else "Raise rollout.steps"),
         "rollout.steps {value} with {facts.plan} trains none",
         "{found}", where="{facts.algorithm} needs trained steps, but"),
    Rule("rollout.plan",
         lambda f, _: f.requires.data == "forward" and not all(f.stores_ends) and
         ("those of every sample" if any(f.stores_ends) else "them"),
         "{facts.plan} does not store {found}",
         "Set rollout.plan to 'final'", where="{facts.algorithm} needs the final latents of a rollout, but"),
    Rule("rollout.plan", lambda f, _: f.requires.data == "states" and _without_states(f),
         "{facts.plan} {found[0]}",
         "Set rollout.plan to {{name: late, options: {{low: {found[1]}, high: {found[2]}}}}}, or lower the algorithm's "
         "steps",
         where="{facts.algorithm} continues from stored states for {facts.requires.calls} steps of rollout.steps "
         "{rollout.steps}, but"),
    Rule("rollout.plan",
         lambda f, _: f.requires.finals and any(s.branches or f.config.rollout.steps not in s.states for s in f.draws),
         "{facts.plan} does not store both",
         "Set rollout.plan to {{name: all, options: {{keep_final: true}}}}",
         where="{facts.algorithm} compares the final latents of samples whose steps it trains, but"),
    Rule("rollout.own_noise", lambda f, own: own and not f.config.rollout.same_noise,
         "rollout.same_noise is false",
         "Set that to true, or remove rollout.own_noise",
         where="{setting} is {value}, which is a distance from the noise that a group shares, but"),
    Rule("rollout.same_noise", lambda f, same: f.requires.same_noise and not same,
         "rollout.same_noise is false",
         "Set it to true",
         where="{facts.algorithm} compares two samples that differ only by the noise after their common start, but"),
    Rule("prompts.sources", lambda f, _: _without_teachers(f),
         "prompts.sources {found[1]}: every prompt needs one",
         "Give each source a teacher, or one to all with the option 'teacher'",
         where="{facts.algorithm} has teachers for {found[0]}, but"),
    Rule("rollout.sampler", lambda f, _: _without_noise(f),
         "rollout.sampler '{value.name}' has no noise there (std {found[1]:.1e}), and a step without noise has no "
         "log-prob",
         "{found[2]}",
         where="{facts.plan} trains step {found[0]} of rollout.steps {rollout.steps} (counted from 0), but"),
    Rule("rollout.sampler", lambda f, own: ":" in own.name and not any(steps.stochastic for steps in f.draws),
         "no step of {facts.plan} has noise, so it would never be called",
         "Remove it, or choose another plan", where="{setting} is '{value.name}', but"),
    Rule("rollout.sampler", lambda f, _: f.requires.densities and not _schedule(f).normalized,
         "rollout.sampler '{value.name}' with log_prob 'squared' leaves their scale out, so the two do not belong to "
         "one ratio",
         "Set rollout.sampler.options.log_prob to 'gaussian'",
         where="{facts.algorithm} with its options compares Gaussian densities, but"),
    Rule("advantage.kl_coef", lambda f, coefficient: coefficient > 0 and (f.draws[0].branches or not f.trained),
         "{facts.plan} has none or branches",
         "Use the algorithm's own kl_coef instead",
         where="{setting} is {value}, which needs a trained step in every sample's chain, but"),
    Rule("optimize.algorithm", lambda f, _: f.requires.average and f.config.optimize.ema is None,
         "optimize.ema is not set",
         "Set optimize.ema, or kl_reference to 'base' or ema_kl_coef to 0",
         where="{facts.algorithm} is compared with the moving average of the weights, but"),
    *UNITS,
    Rule("rollout.solver", lambda f, solver: solver != "euler" and any(steps.stochastic for steps in f.draws),
         "{facts.plan} adds noise between them",
         "Set the solver to 'euler' or the plan to 'final'", where="{setting} {value!r} remembers earlier steps, but"),
    # With the mean over all prompts one sample per prompt is enough, unless the loss compares samples.
    Rule("rollout.group_size",
         lambda f, _: f.group < f.requires.min_group_size and
         (f.config.advantage.mean != "global" or f.requires.unit != "row"),
         "{facts.algorithm} compares samples of one prompt with each other, so all advantages would be 0",
         "Set it to {facts.requires.min_group_size} or more"),
    Rule("model.policy", lambda f, family: _unknown_levels(f, family),
         "model.policy {value!r} knows levels from {found[0]} to {found[1]} only",
         "Set optimize.algorithm.options.times to {{low: {found[2]}, high: {found[3]}}}, or its kind to 'timesteps'",
         where="{facts.algorithm} noises latents to levels from {facts.requires.times.low} to "
         "{facts.requires.times.high}, but"),
    Rule("model.policy", lambda f, family: _without_timesteps(f, family),
         "model.policy {value!r} was trained on all levels",
         "Set its kind to 'stratified' or 'logit_normal'",
         where="{facts.algorithm} draws levels from the timesteps of a training (times.kind 'timesteps'), but"),
    Rule("rewards", lambda f, rewards: all(reward.weight == 0 for reward in rewards),
         "all advantages would be 0 and nothing would be trained",
         "Give one reward a weight, or move those that are only reported to evaluate.judges",
         where="rewards: every weight is 0, so"),
    Rule("rollout.unconditional", lambda f, on: on and not uses_guidance(f.config),
           "there is no guidance by two forwards", "Remove it", where=_NO_USE),
    Rule("rollout.unconditional", lambda f, on: on and f.config.optimize.guidance_gradient == "both",
           "optimize.guidance_gradient is 'both'", "Remove it", where=_NO_USE),
    Rule("rollout.unconditional", lambda f, on: on and f.requires.data != "transitions",
           "{facts.algorithm} trains no stochastic steps", "Remove it", where=_NO_USE),
    Rule("rollout.unconditional", lambda f, on: on and f.config.optimize.replay is not None,
           "optimize.replay trains rows of older policies", "Remove it", where=_NO_USE),
    Rule("rollout.unconditional", lambda f, on: on and f.config.execution.ahead > 0,
           "with execution.ahead rollouts are made by an older policy", "Remove it", where=_NO_USE),
    Rule("optimize.algorithm",
         lambda f, algorithm: "guided" in algorithm.options and not f.requires.guided and f.config.data is None and
         not uses_guidance(f.config),
         "these have none that could be left out: model.guidance_scale is {model.guidance_scale:g}, or an input of the "
         "model",
         "Remove the option, or raise model.guidance_scale",
         where="{facts.algorithm} has the option guided: false, for a loss without the guidance of rollouts, but"),
    Rule("optimize.inner_epochs", lambda f, count: f.requires.once and count > 1,
         f"{{setting}} is {{value}}: {_AS_FAR}", _PASS_ONCE, where=_FOLLOWS),
    Rule("optimize.replay", lambda f, _: f.requires.once,
         f"optimize.replay trains samples of earlier epochs again: {_AS_FAR}", _PASS_ONCE, where=_FOLLOWS),
)  # fmt: skip


def check_combination(combination: Combination) -> None:
    """Check everything that depends on more than one component."""
    refuse(COMBINATION, combination)
    check_engine(combination)


def _without_states(combination: Combination) -> tuple[str, int, int] | None:
    """Return in words the states that a plan lacks to continue from, and the first and last that it should store."""
    latest = combination.config.rollout.steps - combination.requires.calls
    low = max(0, latest)
    if combination.draws[0].branches:
        return "stores one step of each branch", low, low + 1
    if all(any(state <= latest for state in steps.states) for steps in combination.draws):
        return None
    return f"stores none from 0 to {latest} of some samples", low, low + 1


def _without_teachers(combination: Combination) -> tuple[str, str] | None:
    """Return in words the prompt sources that have teachers, and those there are, if they differ."""
    taught = [name for name, _ in combination.requires.teachers if name]
    sources = [source.name for source in combination.config.prompts.sources]
    if not taught or set(taught) == set(sources):
        return None
    return ", ".join(taught), f"are {', '.join(sources)}" if sources else "has none"


def _without_noise(combination: Combination) -> tuple[int, float, str] | None:
    """Return the first trained step without noise, its std, and a remedy."""
    if not combination.trained:
        return None
    stds, last = _schedule(combination).std, combination.config.rollout.steps - 1
    quiet = [step for step in combination.trained if not float(stds[step]) > _NO_NOISE]
    if not quiet:
        return None
    remedy = "Change the sampler's noise option, or set rollout.sampler to 'flow_sde' or 'dance_sde'"
    if not combination.kernel.stochastic:
        remedy = "Set rollout.plan to 'final'"
    elif quiet == [last] and last:
        remedy = "Leave the last step out of the plan, or set rollout.sampler to 'flow_sde' or 'dance_sde'"
    return quiet[0], float(stds[quiet[0]]), remedy


def _unknown_levels(combination: Combination, family: str) -> tuple[float, float, float, float] | None:
    """Return the levels a family knows and those of the algorithm that it knows, if some are unknown."""
    times = combination.requires.times
    if times is None or not times.bounded or family not in KNOWN_LEVELS:
        return None
    high, low = KNOWN_LEVELS[family]
    covered = times.low >= low and times.high <= high
    return None if covered else (low, high, max(times.low, low), min(times.high, high))


def _without_timesteps(combination: Combination, family: str) -> bool:
    """Return whether levels are drawn from timesteps of a training that the family does not have."""
    if combination.requires.times is None or combination.requires.times.kind != "timesteps" or family in KNOWN_LEVELS:
        return False
    return family in POLICIES or not hasattr(resolve(POLICIES, family, label="model.policy"), "trained_levels")


def _schedule(combination: Combination) -> Gaussian:
    """Return the sampler's steps over a schedule with the model's first and last level."""
    steps, ends = combination.config.rollout.steps, _ends(combination.config)
    sigmas = torch.linspace(*ends, steps + 1, dtype=torch.float64)
    nothing = torch.zeros(steps, 1, dtype=torch.float64)
    return combination.kernel.step(nothing, nothing, Grid(sigmas[:-1], sigmas[1:], sigmas[1].expand(steps)))


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
