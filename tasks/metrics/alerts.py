"""Alerts of a run: rules that fire on its metrics, falling monitors, falling held-out scores.

Everything is computed from committed artifacts, so alerts are the same on every machine and after every restart.
An alert lasts as long as its rule fires. It is reported once, at the epoch where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, pi
from statistics import fmean, median_high
from typing import Any

import numpy as np

from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.algorithms.resampling import chance_of_fall
from flowmill.tasks.metrics.evaluations import (
    evaluated_epochs,
    evaluation_figures,
    scores_by_prompt,
    section_bounds,
)
from flowmill.tasks.metrics.monitors import fallen_monitors
from flowmill.tasks.metrics.rules import RULES, History
from flowmill.tasks.runs.chain import Chain

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

    @property
    def label(self) -> str:
        """Rule, subject and epoch, as ``heldout[digits]@3``."""
        return f"{self.rule}[{self.subject}]@{self.epoch}" if self.subject else f"{self.rule}@{self.epoch}"


@dataclass(frozen=True, slots=True)
class _Fall:
    """The change of a held-out score, over the prompts that have both scores."""

    chance: float
    """p-value of a fall."""
    before: np.ndarray
    """(P,) mean score of each prompt before training."""
    after: np.ndarray


def alerts(chain: Chain) -> list[Alert]:
    """Return all alerts of a run in the order of epochs."""
    return Watcher(chain).all()


def alert_tag(chain: Chain) -> str:
    """Return the labels of a run's alerts, each with the epoch where it begins; '' without any."""
    return ", ".join(alert.label for alert in alerts(chain))


class Watcher:
    """Finds the alerts of a growing run, and reads the figures of each epoch once."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._epochs: list[dict[str, float]] = []
        self._rules: list[Alert] = []
        self._firing: set[str] = set()
        self._falls: dict[tuple[ArtifactRef, ArtifactRef], _Fall] = {}

    def all(self) -> list[Alert]:
        """Return all alerts in the order of epochs."""
        changes = [*self._of_rules(), *_of_monitors(self._chain), *self._heldout()]
        return sorted(changes, key=lambda alert: alert.epoch)

    def trained(self, epoch: int) -> list[Alert]:
        """Return the alerts that begin with the training of an epoch."""
        changes = [*self._of_rules(), *_of_monitors(self._chain)]
        return [alert for alert in changes if alert.epoch == epoch]

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
            self._note(History(self._chain.config, self._epochs))
        return History(self._chain.config, self._epochs)

    def _of_rules(self) -> list[Alert]:
        self.history()
        return self._rules

    def _note(self, history: History) -> None:
        """Note the alerts that begin with the last epoch of a history."""
        for rule in RULES.values():
            evidence = rule.fires(history)
            if evidence is None:
                self._firing.discard(rule.name)
            elif rule.name not in self._firing:
                self._firing.add(rule.name)
                epoch = len(history.epochs)
                text = f"epoch {epoch}: {rule.text(evidence, history.config)}"
                self._rules.append(Alert(rule=rule.name, epoch=epoch, text=text))

    def _heldout(self) -> Iterator[Alert]:
        """Yield an alert per reward where its held-out score falls significantly below that of the base model.

        The k-th evaluation after training began is tested at the level ``FALSE_ALARMS`` 6 / (pi^2 k^2). The levels of
        all evaluations sum to ``FALSE_ALARMS`` (union bound), so the rate holds for a run of any length. An episode
        ends where chance explains the difference, at the level ``FALSE_ALARMS``; the next fall is a new one.
        """
        epochs = evaluated_epochs(self._chain)
        if not epochs or epochs[0] != 0:
            return
        first, fallen = evaluation_figures(self._chain, 0).get("heldout", {}), set[str]()
        for number, epoch in enumerate(epochs[1:], 1):
            now = evaluation_figures(self._chain, epoch).get("heldout", {})
            for slot in sorted(now.keys() & first.keys()):
                if "mean" not in now[slot] or "mean" not in first[slot]:
                    continue
                # Means of all prompts show no rise of those with both scores if some failed.
                failed = "failed" in now[slot] or "failed" in first[slot]
                fall = self._fall(slot, epoch) if failed or now[slot]["mean"] < first[slot]["mean"] else None
                if fall is None or fall.chance > FALSE_ALARMS:
                    fallen.discard(slot)
                elif slot not in fallen and fall.chance <= FALSE_ALARMS * 6 / (pi * number) ** 2:
                    fallen.add(slot)
                    yield _fallen(slot, epoch, fall)

    def _fall(self, slot: str, epoch: int) -> _Fall:
        """Return the change of a held-out score since epoch 0; computed once per pair of artifacts."""
        refs = [self._chain.require(each, "judge", slot).ref for each in (0, epoch)]
        if (pair := (refs[0], refs[1])) not in self._falls:
            before, after = (scores_by_prompt(self._chain.store, ref, "heldout") for ref in refs)
            chance = fall_by_chance(before, after, most=0.0)
            if chance <= FALSE_ALARMS:  # otherwise no gain could make it a fall, and no reward needs to be imported
                chance = fall_by_chance(before, after, most=self._largest_gain(slot))
            self._falls[pair] = _Fall(chance, *_paired(before, after))
        return self._falls[pair]

    def _largest_gain(self, slot: str) -> float:
        """Return the width of the scale that a reward declares; infinite without one."""
        config = self._chain.config
        sections = (*config.rewards, *config.monitors, *config.evaluate.judges)
        section = next((each for each in sections if each.slot == slot), None)
        low, high = (-inf, inf) if section is None else section_bounds(section)
        return high - low


def _of_monitors(chain: Chain) -> Iterator[Alert]:
    for monitor, epoch, text in fallen_monitors(chain):
        yield Alert(rule="monitor", subject=monitor, epoch=epoch, text=text)


def _fallen(slot: str, epoch: int, fall: _Fall) -> Alert:
    old, new = float(fall.before.mean()), float(fall.after.mean())
    text = (
        f"epoch {epoch}: on held-out prompts '{slot}' fell from {old:.4g} before training to {new:.4g}, more than "
        "chance explains: training makes the model worse on prompts outside its training. Look at the samples, lower "
        "optimize.learning_rate, add a KL term, or go back to an earlier policy."
    )
    return Alert(rule="heldout", subject=slot, epoch=epoch, text=text)


def fall_by_chance(before: Mapping[str, float], after: Mapping[str, float], *, most: float = inf) -> float:
    """Return the p-value of a fall of scores, paired by prompt.

    Args:
        before: the mean score of each prompt before training; NaN for prompts without one.
        after: the same after training.
        most: the largest possible gain of a prompt; infinite if unknown.
    """
    old, new = _paired(before, after)
    return chance_of_fall(new - old, most=most)


def _paired(before: Mapping[str, float], after: Mapping[str, float]) -> np.ndarray:
    """Return the scores before and after of the prompts that have both, (2, P)."""
    scores = np.array([(before[prompt], after[prompt]) for prompt in before if prompt in after]).reshape(-1, 2)
    paired: np.ndarray = scores[np.isfinite(scores).all(1)].T
    return paired


def _figures(chain: Chain, epoch: int) -> dict[str, float] | None:
    """Return the figures of a trained epoch for rules; None while its training is not complete."""
    figures: dict[str, float] = {}
    for node in (*chain.plan.scored(epoch), *chain.plan.training(epoch)):
        entry = chain.find(*node)
        manifest = None if entry is None else chain.store.manifest(entry.ref)
        if manifest is None:
            return None
        if node.stage == "optimize":
            figures |= _updates(manifest.summary)
        elif not node.slot:
            figures |= {f"{node.stage}/{name}": value for name, value in manifest.summary.items() if _is_number(value)}
    return figures


def _updates(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return mean, maximum, upper median and last value of each figure over an epoch's updates, and those of the epoch:
    how far the updates moved the policy, and how many are left out."""
    values: dict[str, list[float]] = {}
    for update in summary["updates"]:
        for name, value in update.items():
            values.setdefault(name, []).append(float(value))
    figures = {f"optimize/{name}": float(value) for name, value in summary.items() if _is_number(value)}
    for name, each in values.items():
        of_epoch = {"": fmean(each), "/max": max(each), "/median": median_high(each), "/last": each[-1]}
        figures |= {f"optimize/{name}{kind}": value for kind, value in of_epoch.items()}
    return figures


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
