"""Alerts of a run: rules that fire on its figures, monitors that fall, held-out scores that fall.

Everything is computed from committed artifacts, so an alert is the same on every machine and after every restart.
An alert lasts as long as its rule fires; it is reported once, at the epoch where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import pi
from statistics import fmean
from typing import Any

import numpy as np

from storage.tables import read_shard
from tasks.algorithms.resampling import FEWEST
from tasks.metrics.evaluations import evaluated_epochs, evaluation_figures, split_of
from tasks.metrics.monitors import monitor_alerts
from tasks.metrics.rules import RULES, History
from tasks.runs.chain import Chain
from tasks.specs.graph import scored_nodes, training_nodes

#: Chance of a false alert of held-out scores, per reward and run, however many evaluations it has.
FALSE_ALARMS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One fault of a run, from the epoch where it begins."""

    rule: str
    """Name of the rule: one of ``RULES``, ``monitor`` or ``heldout``."""
    epoch: int
    """The first epoch it shows after."""
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


class Watcher:
    """Finds the alerts of a run as it grows, and reads the figures of each epoch once."""

    def __init__(self, chain: Chain) -> None:
        """Bind to the chain of a run."""
        self._chain = chain
        self._epochs: list[dict[str, float]] = []

    def all(self) -> list[Alert]:
        """Return all alerts in the order of epochs."""
        found = [*_of_rules(self.history()), *_of_monitors(self._chain), *_of_heldout(self._chain)]
        return sorted(found, key=lambda alert: alert.epoch)

    def trained(self, epoch: int) -> list[Alert]:
        """Return the alerts that begin with the training of an epoch."""
        found = [*_of_rules(self.history()), *_of_monitors(self._chain)]
        return [alert for alert in found if alert.epoch == epoch]

    def evaluated(self, epoch: int) -> list[Alert]:
        """Return the alerts that begin with the evaluation after an epoch."""
        return [alert for alert in _of_heldout(self._chain) if alert.epoch == epoch]

    def history(self) -> History:
        """Return the figures of the epochs that are complete; reads manifests only."""
        for epoch in range(len(self._epochs) + 1, self._chain.config.run.epochs + 1):
            figures = _figures(self._chain, epoch)
            if figures is None:
                break
            self._epochs.append(figures)
        return History(self._chain.config, self._epochs)


def _of_rules(history: History) -> Iterator[Alert]:
    for rule in RULES.values():
        fired = False
        for epoch in range(1, len(history.epochs) + 1):
            evidence = rule.fires(history.upto(epoch))
            if evidence is not None and not fired:
                yield Alert(rule=rule.name, epoch=epoch, text=f"epoch {epoch}: {rule.text(evidence)}")
            fired = evidence is not None


def _of_monitors(chain: Chain) -> Iterator[Alert]:
    for found in monitor_alerts(chain):
        yield Alert(rule="monitor", subject=found.monitor, epoch=found.epoch, text=found.text())


def _of_heldout(chain: Chain) -> Iterator[Alert]:
    """Yield where a held-out score first falls below that of the base model by more than chance explains.

    The k-th evaluation after training began is tested at the level ``FALSE_ALARMS`` 6 / (pi^2 k^2). The levels of all
    evaluations sum to ``FALSE_ALARMS`` (union bound), so the rate holds for a run of any length.
    """
    epochs = evaluated_epochs(chain)
    if not epochs or epochs[0] != 0:
        return
    first, known = evaluation_figures(chain, 0).get("heldout", {}), set[str]()
    for number, epoch in enumerate(epochs[1:], 1):
        now = evaluation_figures(chain, epoch).get("heldout", {})
        for slot in sorted((now.keys() & first.keys()) - known):
            fell = now[slot]["mean"] < first[slot]["mean"]
            if fell and _chance(chain, slot, epoch) <= FALSE_ALARMS * 6 / (pi * number) ** 2:
                known.add(slot)
                yield _fallen(slot, epoch, first[slot]["mean"], now[slot]["mean"])


def _fallen(slot: str, epoch: int, before: float, after: float) -> Alert:
    text = (
        f"epoch {epoch}: on held-out prompts '{slot}' fell from {before:.4g} before training to {after:.4g}, more than "
        "chance explains: training makes the model worse at what it was not trained on. Look at the samples, lower "
        "optimize.learning_rate, add a KL term, or go back to an earlier policy."
    )
    return Alert(rule="heldout", subject=slot, epoch=epoch, text=text)


def _chance(chain: Chain, slot: str, epoch: int) -> float:
    """Return how likely a fall of a held-out score is without a change: a one-sided paired t-test over prompts."""
    from scipy.stats import ttest_1samp

    before, after = (_by_prompt(chain, each, slot) for each in (0, epoch))
    differences = np.array([after[prompt] - before[prompt] for prompt in before.keys() & after.keys()])
    if len(differences) < FEWEST or not differences.any():
        return 1.0
    return float(ttest_1samp(np.sort(differences), 0.0, alternative="less").pvalue)


def _by_prompt(chain: Chain, epoch: int, slot: str) -> dict[str, float]:
    """Return the mean held-out score of each prompt in an evaluation."""
    ref = chain.require(epoch, "judge", slot).ref
    scores: dict[str, list[float]] = {}
    for record in chain.store.shards(ref):
        if split_of(record.shard) != "heldout":
            continue
        table = read_shard(chain.store, ref, record)
        columns = (table.column(name).to_pylist() for name in ("prompt_id", "reward"))
        for prompt, score in zip(*columns, strict=True):
            if score is not None:
                scores.setdefault(prompt, []).append(score)
    return {prompt: fmean(values) for prompt, values in scores.items()}


def _figures(chain: Chain, epoch: int) -> dict[str, float] | None:
    """Return the figures of a trained epoch that rules read; None while its training is not complete."""
    found: dict[str, float] = {}
    for node in (*scored_nodes(chain.config, epoch), *training_nodes(chain.config, epoch)):
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
    """Return each figure of an epoch's updates: their mean, the largest and the last."""
    values: dict[str, list[float]] = {}
    for update in summary["updates"]:
        for name, value in update.items():
            values.setdefault(name, []).append(float(value))
    found: dict[str, float] = {}
    for name, each in values.items():
        found |= {f"optimize/{name}": fmean(each), f"optimize/{name}/max": max(each), f"optimize/{name}/last": each[-1]}
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
