"""Joins the rewards of an epoch into one advantage per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowmill.configs.rewards import RewardSection
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.turns import turns_of
from flowmill.tasks.stages.stage import Output, Shard, Stage


class AdvantageStage(Stage):
    """The rewards of an epoch, normalized within groups, as one advantage per sample."""

    # Statistics are over the whole epoch.
    only = "advantages"

    def options(self) -> Mapping[str, Any]:
        """Weights in the order of the inputs, and the normalization; other settings only where they have an effect."""
        rewards = self.config.rewards
        more: dict[str, Any] = {}
        for name in ("threshold", "standardize"):
            if any(getattr(section, name) for section in rewards):
                more[name] = [getattr(section, name) for section in rewards]
        if any(section.excludes for section in rewards) and self._failures():
            more["on_failure"] = [section.on_failure for section in rewards]
        if self._charges:
            more["turn_cost"] = self._charges
        weights = [section.weight for section in rewards]
        section = self.config.advantage.fingerprinted()
        return {"advantage": section, "weights": weights, **more}

    def upstream(self) -> tuple[Node, ...]:
        """The rewards of this epoch, with running statistics those before it, with a KL reward their trajectories.

        With a gate on the KL the monitors that doubt a reward are read too, and the one that weighs advantages.
        A cost of turns needs the images. Advantages of tokens need their trajectories, and as the estimator asks the
        values of this epoch and the advantages of the one before.
        """
        rewards = tuple(Node(epoch, "score", section.slot) for epoch in self.epochs for section in self.sections)
        if self._charges:
            rewards += tuple(Node(epoch, "render") for epoch in self.epochs)
        estimator = self.plan.estimator
        section = self.config.advantage
        if estimator.per_token:
            values = (Node(self.epoch, "value"),) if self.plan.has_values else ()
            before = (Node(self.epoch - 1, "advantage"),) if estimator.adapts and self.epoch > 1 else ()
            return (*rewards, Node(self.epoch, "rollout"), *values, *before)
        if section.kl_coef > 0 or section.overlong is not None:
            return (*rewards, *(Node(epoch, "rollout") for epoch in self.epochs))
        return rewards

    def run(self, shard: Shard, folder: Path) -> Output:
        from flowmill.tasks.stages.epoch_advantages import EpochAdvantages

        return EpochAdvantages(self, scored=len(self.sections), epochs=len(self.epochs)).write(folder)

    @property
    def sections(self) -> tuple[RewardSection, ...]:
        """The rewards whose scores are read: those that are optimized, monitors that doubt, the one that weighs."""
        monitors, section = self.config.monitors, self.config.advantage
        doubting = () if section.kl_gate is None else self.doubting
        return (*self.config.rewards, *doubting, *(each for each in monitors if each.slot == section.diversity))

    @property
    def doubting(self) -> tuple[RewardSection, ...]:
        """The monitors that doubt a reward: all but the one that measures the diversity of samples."""
        diversity = self.config.advantage.diversity
        return tuple(each for each in self.config.monitors if each.slot != diversity)

    @property
    def epochs(self) -> Sequence[int]:
        """The epochs whose rewards count, this one first."""
        return range(self.epoch, 0 if self.config.advantage.std == "running" else self.epoch - 1, -1)

    @property
    def _charges(self) -> float:
        turns = turns_of(self.config)
        return 0.0 if turns is None else turns.cost

    def _failures(self) -> int:
        """Return how many scores failed, as far as rewards are committed; a plan may read it before."""
        entries = [self.find(node) for node in self.upstream() if node.stage == "score"]
        manifests = [self.facts.store.manifest(entry.ref) for entry in entries if entry is not None]
        return sum(int(manifest.summary.get("failed", 0)) for manifest in manifests if manifest is not None)
