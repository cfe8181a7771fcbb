"""Alerts of a run: rules that fire on its metrics, falling monitors, falling held-out scores.

Everything is computed from committed artifacts, so alerts are the same on every machine and after every restart.
An alert lasts as long as its rule fires. It is reported once, at the epoch where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import pi, sqrt
from statistics import fmean, median_high
from typing import Any

import numpy as np

from storage.layout import ArtifactRef
from tasks.algorithms.resampling import FEWEST
from tasks.metrics.evaluations import evaluated_epochs, evaluation_figures, scores_by_prompt
from tasks.metrics.monitors import monitor_alerts
from tasks.metrics.rules import RULES, History, Rule
from tasks.runs.chain import Chain

#: Names of all rules.
NAMES = (*RULES, "monitor", "heldout")
#: Tag of an MLflow run with its alerts.
TAG = "flowmill.alerts"
#: Probability of a false alert of held-out scores, per reward and run, for any number of evaluations.
FALSE_ALARMS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One fault of a run, from the epoch where it begins."""

    rule: str
    """Name of the rule: one of ``RULES``, ``monitor`` or ``heldout``."""
    epoch: int
    """The first epoch after which it shows."""
    text: str
    """Evidence, meaning and remedy in words."""
    subject: str = ""
    """The monitor or reward it concerns."""

    @property
    def label(self) -> str:
        """Rule, subject and epoch, as ``heldout[digits]@3``."""
        return f"{self.rule}[{self.subject}]@{self.epoch}" if self.subject else f"{self.rule}@{self.epoch}"


def alerts(chain: Chain) -> list[Alert]:
    """Return all alerts of a run in the order of epochs."""
    return Watcher(chain).all()


def alert_tag(chain: Chain) -> str:
    """Return the labels of a run's alerts, each with the epoch where it begins; '' without any."""
    return ", ".join(alert.label for alert in alerts(chain))


class Watcher:
    """Finds the alerts of a growing run, and reads the figures of each epoch once."""

    def __init__(self, chain: Chain) -> None:
        """Bind to the chain of a run."""
        self._chain = chain
        self._epochs: list[dict[str, float]] = []
        self._chances: dict[tuple[ArtifactRef, ArtifactRef], float] = {}

    def all(self) -> list[Alert]:
        """Return all alerts in the order of epochs."""
        found = [*_of_rules(self.history()), *_of_monitors(self._chain), *self._heldout()]
        return sorted(found, key=lambda alert: alert.epoch)

    def trained(self, epoch: int) -> list[Alert]:
        """Return the alerts that begin with the training of an epoch."""
        found = [*_of_rules(self.history()), *_of_monitors(self._chain)]
        return [alert for alert in found if alert.epoch == epoch]

    def firing(self, epoch: int) -> list[Alert]:
        """Return the rules that fire after the training of an epoch, also those that began before, and new alerts."""
        upto = self.history().upto(epoch)
        found = [(rule, rule.fires(upto)) for rule in RULES.values()]
        rules = [_alert(rule, epoch, evidence) for rule, evidence in found if evidence is not None]
        return [*rules, *(alert for alert in _of_monitors(self._chain) if alert.epoch == epoch)]

    def evaluated(self, epoch: int) -> list[Alert]:
        """Return the alerts that begin with the evaluation after an epoch."""
        return [alert for alert in self._heldout() if alert.epoch == epoch]

    def history(self) -> History:
        """Return the figures of complete epochs; reads manifests only."""
        for epoch in range(len(self._epochs) + 1, self._chain.config.run.epochs + 1):
            figures = _figures(self._chain, epoch)
            if figures is None:
                break
            self._epochs.append(figures)
        return History(self._chain.config, self._epochs)

    def _heldout(self) -> Iterator[Alert]:
        """Yield an alert per reward where its held-out score first falls significantly below that of the base model.

        The k-th evaluation after training began is tested at the level ``FALSE_ALARMS`` 6 / (pi^2 k^2). The levels of
        all evaluations sum to ``FALSE_ALARMS`` (union bound), so the rate holds for a run of any length.
        """
        epochs = evaluated_epochs(self._chain)
        if not epochs or epochs[0] != 0:
            return
        first, known = evaluation_figures(self._chain, 0).get("heldout", {}), set[str]()
        for number, epoch in enumerate(epochs[1:], 1):
            now = evaluation_figures(self._chain, epoch).get("heldout", {})
            for slot in sorted((now.keys() & first.keys()) - known):
                fell = now[slot]["mean"] < first[slot]["mean"]
                if fell and self._chance(slot, epoch) <= FALSE_ALARMS * 6 / (pi * number) ** 2:
                    known.add(slot)
                    yield _fallen(slot, epoch, first[slot]["mean"], now[slot]["mean"])

    def _chance(self, slot: str, epoch: int) -> float:
        """Return the p-value of a fall of a held-out score; computed once per pair of artifacts."""
        before, after = (self._chain.require(each, "judge", slot).ref for each in (0, epoch))
        if (before, after) not in self._chances:
            scores = (scores_by_prompt(self._chain.store, ref, "heldout") for ref in (before, after))
            self._chances[before, after] = fall_by_chance(*scores)
        return self._chances[before, after]


def _of_rules(history: History) -> Iterator[Alert]:
    for rule in RULES.values():
        fired = False
        for epoch in range(1, len(history.epochs) + 1):
            evidence = rule.fires(history.upto(epoch))
            if evidence is not None and not fired:
                yield _alert(rule, epoch, evidence)
            fired = evidence is not None


def _alert(rule: Rule, epoch: int, evidence: str) -> Alert:
    return Alert(rule=rule.name, epoch=epoch, text=f"epoch {epoch}: {rule.text(evidence)}")


def _of_monitors(chain: Chain) -> Iterator[Alert]:
    for found in monitor_alerts(chain):
        yield Alert(rule="monitor", subject=found.monitor, epoch=found.epoch, text=found.text())


def _fallen(slot: str, epoch: int, before: float, after: float) -> Alert:
    text = (
        f"epoch {epoch}: on held-out prompts '{slot}' fell from {before:.4g} before training to {after:.4g}, more than "
        "chance explains: training makes the model worse on prompts outside its training. Look at the samples, lower "
        "optimize.learning_rate, add a KL term, or go back to an earlier policy."
    )
    return Alert(rule="heldout", subject=slot, epoch=epoch, text=text)


def fall_by_chance(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the p-value of a fall of scores, from a one-sided paired t-test over prompts.

    Args:
        before: the mean score of each prompt before training; NaN for prompts without one.
        after: the same after training.
    """
    # The import of scipy.stats takes longer than the other work of 'flowmill status'.
    from scipy.special import stdtr

    differences = np.array([after[prompt] - before[prompt] for prompt in before.keys() & after.keys()])
    differences = np.sort(differences[np.isfinite(differences)])
    if len(differences) < FEWEST or not differences.any():
        return 1.0
    count = len(differences)
    with np.errstate(divide="ignore"):
        statistic = differences.mean() / (differences.std(ddof=1) / sqrt(count))
    return float(stdtr(count - 1, statistic))


def _figures(chain: Chain, epoch: int) -> dict[str, float] | None:
    """Return the figures of a trained epoch for rules; None while its training is not complete."""
    found: dict[str, float] = {}
    for node in (*chain.plan.scored(epoch), *chain.plan.training(epoch)):
        entry = chain.find(*node)
        manifest = None if entry is None else chain.store.manifest(entry.ref)
        if manifest is None:
            return None
        if node.stage == "optimize":
            found |= _updates(manifest.summary)
        elif not node.slot:
            found |= {f"{node.stage}/{name}": value for name, value in manifest.summary.items() if _is_number(value)}
    return found


def _updates(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return mean, maximum, upper median and last value of each figure over an epoch's updates, and the number of those
    left out."""
    values: dict[str, list[float]] = {}
    for update in summary["updates"]:
        for name, value in update.items():
            values.setdefault(name, []).append(float(value))
    if "left_out_kl" in summary:  # the policy moved as far as the first update that was left out shows
        values.setdefault("approx_kl", []).append(summary["left_out_kl"])
    found = {f"optimize/{name}": float(summary[name]) for name in ("left_out", "left_out_kl") if name in summary}
    for name, each in values.items():
        of_epoch = {"": fmean(each), "/max": max(each), "/median": median_high(each), "/last": each[-1]}
        found |= {f"optimize/{name}{kind}": value for kind, value in of_epoch.items()}
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
