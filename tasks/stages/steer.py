"""Decides after an epoch which policy the next one starts from: this one, or after an alert the best before it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.artifacts.records import ShardRecord
from tasks.specs.graph import Node
from tasks.specs.steering import start_of, steering_options
from tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from tasks.metrics.alerts import Alert

#: Rules by which rewards of rollouts may rise while the policy gets worse.
_HELD_OUT = ("heldout", "monitor")


class SteerStage(Stage):
    """The decision after an epoch, in runs whose ``watch.on`` goes back."""

    def options(self) -> Mapping[str, Any]:
        """The rules and the factor of the learning rate."""
        return {**steering_options(self.config), "epoch": self.epoch}

    def upstream(self) -> tuple[Node, ...]:
        """The policy and the figures of this epoch, and the decision before, which depends on all epochs before.

        Only evaluations at the interval count: the last one of a run is no longer one when the run has grown.
        """
        plan = self.facts.plan
        before = plan.steering(self.epoch - 1) if self.epoch > 1 else ()
        evaluated = [epoch for epoch in (0, self.epoch) if epoch % self.config.evaluate.every == 0]
        return (
            *plan.scored(self.epoch),
            *plan.training(self.epoch),
            *(node for epoch in evaluated for node in plan.evaluation(epoch)),
            *before,
        )

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("decision")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Decide, and say so if it goes back."""
        start = start_of(self.facts, self.epoch)
        decision: dict[str, Any] = {"policy": self.epoch, "rate": start.rate, "reason": ""}
        alerts = [alert for alert in self._firing() if alert.rule in self.config.watch.rules("back")]
        if alerts:
            best, rate = self._best(alerts), start.rate * self.config.watch.rate
            reason = (
                f"epoch {self.epoch + 1} starts from the policy after epoch {best}, the best before, at {rate:.3g} of "
                f"the learning rate: {'; '.join(alert.text for alert in alerts)}"
            )
            decision = {"policy": best, "rate": rate, "reason": reason}
            self.context.reporter.message(reason)
        (folder / "decision.json").write_text(json.dumps(decision, sort_keys=True))
        return Output(rows=1, summary=decision)

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """The decision: epoch of the policy, factor of the learning rate, and reason."""
        return records[0].summary

    def _firing(self) -> list[Alert]:
        from tasks.metrics.alerts import Watcher

        watcher, evaluated = Watcher(self.context.chain), self.epoch % self.config.evaluate.every == 0
        return [*watcher.firing(self.epoch), *(watcher.evaluated(self.epoch) if evaluated else ())]

    def _best(self, alerts: Sequence[Alert]) -> int:
        """Return the epoch of the best policy before; of equal ones the newest.

        A policy is measured by the mean reward of the rollouts of the epoch that starts from it; by the weighted
        held-out reward of its evaluation, if an alert says that the former misleads, or if there are no rollouts.
        """
        from tasks.metrics.evaluations import evaluation_figures, weighted_reward

        chain, every = self.context.chain, self.config.evaluate.every
        if self.facts.plan.given or any(alert.rule in _HELD_OUT for alert in alerts):
            scores = {
                epoch: weighted_reward(self.config, evaluation_figures(chain, epoch))
                for epoch in range(0, self.epoch, every)
            }
        else:
            scores = {}
            for epoch in range(1, self.epoch + 1):
                summary = self.context.store.require(chain.require(epoch, "advantage").ref).summary
                scores[start_of(self.facts, epoch).policy.epoch] = float(summary["reward_mean"])
        return max(scores, key=lambda epoch: (scores[epoch], epoch))
