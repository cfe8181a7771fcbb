"""Alert rules over the figures of a run: the symptoms of failing training, their meaning and remedies, in one table.

A rule only reads figures of trained epochs, so it gives the same answer on every machine and after every restart.
Rules that compare samples with each other (monitors, held-out scores) are in ``flowmill.tasks.metrics.alerts``.
A new rule is one entry of ``RULES``; ``tests/tasks/metrics/test_alerts.py`` requires a run that has its fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.components import make_algorithm


@dataclass(frozen=True, slots=True)
class History:
    """The figures of a run up to an epoch."""

    config: RunConfig
    epochs: Sequence[Mapping[str, float]]
    """By epoch from 1: name -> value. ``NAME`` is the mean over the updates of an epoch, ``NAME/max`` the largest,
    ``NAME/median`` the upper median."""

    def last(self, name: str, count: int = 1) -> list[float]:
        """Return a figure of the last epochs; empty unless all of them have it."""
        values = [figures[name] for figures in self.epochs[-count:] if name in figures]
        return values if len(values) == count else []

    def before(self, name: str) -> list[float]:
        """Return a figure of all epochs before the last."""
        return [figures[name] for figures in self.epochs[:-1] if name in figures]


#: Returns the evidence in words if the rule fires, else None.
Condition = Callable[[History], "str | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """A rule that detects one fault of training."""

    name: str
    condition: str
    """The condition in words."""
    fires: Condition
    meaning: str
    """Interpretation of the symptom."""
    remedy: str
    advice: Callable[[RunConfig], str] | None = None
    """The same with the values of a run."""
    source: str
    """Source of the rule or its limit."""
    false_alarms: str
    """Frequency on runs without the fault."""

    def text(self, evidence: str, config: RunConfig) -> str:
        """Return one warning in words for the run of a config."""
        remedy = self.remedy if self.advice is None else self.advice(config)
        return f"{evidence}: {self.meaning}. {remedy}."


def _no_spread(history: History) -> str | None:
    values = history.last("advantage/zero_std_ratio", 2)
    if not values or min(values) < 0.95:
        return None
    return f"the share of groups with equal rewards is {values[-1]:.3g}, 0.95 or more for 2 epochs"


#: KLs of an epoch with the limits that its algorithm set, and what they are to.
_KLS = (
    ("kl_epoch", "kl_epoch_limit", "from the policy that made the samples"),
    ("left_out_kl", "kl_epoch_limit", "from the policy that made the samples, with an update that is undone"),
    ("kl_base", "kl_base_limit", "from the base model"),
)


def _moved(history: History) -> str | None:
    for name, limit, of in _KLS:
        value, most = history.last(f"optimize/{name}"), history.last(f"optimize/{limit}")
        if value and most and value[0] >= most[0]:
            return f"the policy is {value[0]:.3g} nats {of}, {most[0]:.3g} or more"
    return None


def _nearer(config: RunConfig) -> str:
    """Return how to keep a run's policy near, with the run's values."""
    section = config.optimize
    updates = section.updates_per_epoch * section.inner_epochs
    # To read a run imports no custom algorithm.
    algorithm = None if ":" in section.algorithm.name else make_algorithm(config)
    clip, kl_coef = getattr(algorithm, "clip_range", None), getattr(algorithm, "kl_coef", None)
    lower = [f"optimize.learning_rate ({section.learning_rate:g})"]
    if updates > 1:
        lower.append(f"the updates per epoch ({updates})")
    if clip is not None:
        lower.append(f"clip_range ({clip:g}{'' if updates > 1 else ', which one update per epoch does not meet'})")
    further = [] if kl_coef is None else [f"raise kl_coef ({kl_coef:g})"]
    further += ["set optimize.stop_kl, which undoes such updates"] if section.stop_kl is None else []
    return "; ".join([f"Lower {' or '.join(lower)}", *further])


def _clipped(history: History) -> str | None:
    low, high = history.last("optimize/clip_low/last"), history.last("optimize/clip_high/last")
    share = low[0] + high[0] if low and high else 0.0
    return (
        f"{share:.0%} of the rows of the last update are clipped (too far from the rollout's policy), and train nothing"
        if share >= 0.9
        else None
    )


def _exploding(history: History) -> str | None:
    now, before = history.last("optimize/grad_norm/max"), history.before("optimize/grad_norm/max")
    if now and not math.isfinite(now[0]):
        return "the gradient norm is not finite"
    usual = median(before) if len(before) >= 3 else 0.0
    if not now or usual <= 0 or now[0] < 100 * usual:
        return None
    return f"the gradient norm is {now[0]:.3g}, {now[0] / usual:.0f} times its median of {usual:.3g}"


def _no_gradient(history: History) -> str | None:
    # The policy is frozen while only the critic is trained.
    if len(history.epochs) <= history.config.critic.alone_epochs:
        return None
    norms = history.last("optimize/grad_norm/max")
    return "the gradient norm is 0 in every update" if norms == [0.0] else None


def _entropy(history: History) -> str | None:
    now, before = history.last("optimize/entropy"), history.before("optimize/entropy")
    if not now or not before or now[0] > 0.02 * before[0]:
        return None
    return f"the entropy is {now[0]:.3g} nats per token, {now[0] / before[0]:.1%} of that of the first epoch"


def _gap(history: History) -> str | None:
    for name in ("optimize/sampler_gap/max", "optimize/replay_gap_max/max"):
        now, before = history.last(name), history.before(name)
        if now and before and now[0] >= 0.01 and now[0] >= 10 * before[0]:
            return f"log-probs differ from those of sampling by up to {now[0]:.3g}, {before[0]:.2g} in the first epoch"
    return None


def _unexplained(history: History) -> str | None:
    values = history.last("advantage/explained_variance", 3)
    if not values or max(values) >= 0:
        return None
    return f"the critic's explained variance is {values[-1]:.3g}, and below 0 for 3 epochs"


def _length(history: History) -> str | None:
    tokens, now, before = (
        history.config.rollout.tokens,
        history.last("optimize/length", 2),
        history.before("optimize/length"),
    )
    if tokens is None or not now or min(now) < 0.95 * tokens.max_new or before[0] >= 0.9 * tokens.max_new:
        return None
    return f"completions have {now[-1]:.1f} of at most {tokens.max_new} tokens, {before[0]:.1f} in the first epoch"


def _share(history: History, name: str) -> float:
    """Return a count of the last epoch over the number of its samples."""
    counts, samples = history.last(name), history.last("rollout/samples")
    return counts[0] / samples[0] if counts and samples and samples[0] else 0.0


def _repeats(history: History) -> str | None:
    share = _share(history, "rollout/repeats")
    return f"{share:.0%} of the samples equal another of their group" if share >= 0.8 else None


def _failed(history: History) -> str | None:
    share = _share(history, "advantage/excluded_samples")
    return f"{share:.0%} of the samples have no score and are left out" if share >= 0.1 else None


_MEASURED = "none in the runs of docs/operating.md#alerts"
_NEVER = "none: the condition is exact"

#: All rules over figures of epochs, by name.
RULES: Mapping[str, AlertRule] = {
    rule.name: rule
    for rule in (
        AlertRule(
            name="kl",
            condition=(
                "after an epoch the policy is 1 nat per token or more from the one that made its samples (of "
                "denoisers: log-ratios are ten times the clip range), or 2 nats per token from the base model"
            ),
            fires=_moved,
            meaning="one epoch moved it so far, or all epochs did, that it may no longer write or draw anything useful",
            remedy="Lower optimize.learning_rate or the clip range, raise kl_coef, or set optimize.stop_kl",
            advice=_nearer,
            source="Schulman 2020, approximating KL divergence (k3); PPO implementations stop at 0.01 to 0.05",
            false_alarms="1 in 60 first epochs (docs/evidence.md)",
        ),
        AlertRule(
            name="clipped",
            condition="90 % or more of the rows of the last update of an epoch are clipped",
            fires=_clipped,
            meaning="nearly no row has a gradient any more, so further updates learn nothing",
            remedy="Lower optimize.learning_rate, take fewer updates per epoch, or widen the clip range",
            source="arXiv 1707.06347, eq. 7: a clipped row has gradient 0",
            false_alarms=_MEASURED,
        ),
        AlertRule(
            name="gradient_exploding",
            condition="a gradient norm is not finite, or 100 times the median of at least three earlier epochs",
            fires=_exploding,
            meaning="an update is far larger than those before it",
            remedy="Lower optimize.learning_rate or optimize.max_grad_norm, and look at that epoch's rewards",
            source="arXiv 1211.5063 (norm clipping)",
            false_alarms=_MEASURED,
        ),
        AlertRule(
            name="gradient_zero",
            condition="the gradient norm is exactly 0 in every update of an epoch that trains the policy",
            fires=_no_gradient,
            meaning="the policy does not learn",
            remedy="Look at advantage/zero_std_ratio and the clip shares: all advantages may be 0",
            source="identity",
            false_alarms=_NEVER,
        ),
        AlertRule(
            name="entropy",
            condition="the mean entropy of an epoch is 2 % or less of that of the first",
            fires=_entropy,
            meaning="the policy samples the same tokens again and again and explores no more",
            remedy="Raise clip_high or the temperature, add a KL term, or stop here if the task is solved",
            source="arXiv 2503.14476, section 3.1 (entropy collapse)",
            false_alarms=_MEASURED,
        ),
        AlertRule(
            name="log_prob_gap",
            condition="log-probs of sampling and training differ by 0.01 or more and by 10 times those of epoch 1",
            fires=_gap,
            meaning="the sampling policy is drifting away from the trained policy",
            remedy="Use model.dtype float32, equal batch sizes, or rollout.tokens.rescore, and update the engine",
            source="arXiv 2510.18927 (training-inference mismatch)",
            false_alarms=_MEASURED,
        ),
        AlertRule(
            name="no_spread",
            condition="95 % or more of the groups have equal rewards in two epochs in a row",
            fires=_no_spread,
            meaning="solved or hopeless prompts are paid for and teach nothing",
            remedy="Use other prompts, a larger rollout.group_size, or a reward that tells samples apart",
            source="arXiv 2503.14476, section 3.2 (dynamic sampling)",
            false_alarms=_MEASURED,
        ),
        AlertRule(
            name="explained_variance",
            condition="the critic's explained variance is below 0 in three epochs in a row",
            fires=_unexplained,
            meaning="the critic predicts returns worse than their mean does, so it adds noise to advantages",
            remedy="Train it longer alone (critic.alone_epochs) or with another critic.learning_rate",
            source="1 - Var(return - value) / Var(return), as PPO implementations log it",
            false_alarms=_MEASURED,
        ),
        AlertRule(
            name="length",
            condition="completions reach 95 % of max_new in two epochs in a row, and did not in the first epoch",
            fires=_length,
            meaning="completions are cut, so their end is not scored",
            remedy="Raise rollout.tokens.max_new, or use advantage.overlong",
            source="arXiv 2503.14476, section 3.4 (overlong completions)",
            false_alarms=_MEASURED,
        ),
        AlertRule(
            name="identical_samples",
            condition="80 % or more of the samples of an epoch equal another of their group",
            fires=_repeats,
            meaning="the policy has collapsed to one sample per prompt",
            remedy="Raise the noise of the sampler or the temperature, or go back to an earlier policy",
            source="identity of the stored bytes",
            false_alarms=_MEASURED,
        ),
        AlertRule(
            name="excluded",
            condition="10 % or more of the samples of an epoch have no score",
            fires=_failed,
            meaning="training sees only a part of the samples, which may be biased by the cause of the failures",
            remedy="Read the notes of failed scores with 'flowmill view', and mend the reward",
            source="count",
            false_alarms=_NEVER,
        ),
    )
}
