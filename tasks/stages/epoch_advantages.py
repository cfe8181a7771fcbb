"""Computes the advantages of an epoch from its rewards, one per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError, CorruptError, RewardError
from flowmill.configs.escaping import command
from flowmill.configs.roots import root_option
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.storage.trajectories.tables import read_rows, write_rows
from flowmill.tasks.advantages.estimators import EarnedBySamples, Group, TokenEstimator, estimated
from flowmill.tasks.advantages.groups import (
    Normalizer,
    diversity_weighted,
    gdpo_advantages,
    group_advantages,
    group_statistics,
    groups_within,
    informative_groups,
    running_advantages,
    shape_advantages,
)
from flowmill.tasks.advantages.tokens import overlong_penalty
from flowmill.tasks.advantages.uncertainty import uncertain
from flowmill.tasks.algorithms.checks import check_advantage
from flowmill.tasks.inputs.weight_sources import origin_of
from flowmill.tasks.metrics.reward_tables import group_numbers, optimized_parts
from flowmill.tasks.specs.turns import turns_of
from flowmill.tasks.stages.sample_rewards import (
    SampleRewards,
    by_sample,
    drawings_of,
    figures_of_samples,
    history_of,
    weighted,
)
from flowmill.tasks.stages.stage import Output, Stage
from flowmill.tasks.stages.token_tables import TokenTables

_IDENTITY = ("sample_id", "prompt_id", "group_id")


class EpochAdvantages:
    """The tables of the advantage stage."""

    def __init__(self, stage: Stage, *, scored: int, epochs: int) -> None:
        """Bind to the stage. ``scored``: rewards and monitors that are read of each epoch; ``epochs``: epochs whose
        rewards count."""
        self._stage, self._scored, self._count = stage, scored, epochs
        self.config, self.context, self.epoch, self.inputs = stage.config, stage.context, stage.epoch, stage.inputs()

    def write(self, folder: Path) -> Output:
        """Compute and write the tables."""
        check_advantage(self.config)
        section = self.config.advantage
        everything, *earlier = self._epochs()
        counted = self._counted(everything)
        trained, informative = self._informative(everything, counted)
        now = everything.take(trained)
        estimator = self.context.plan.estimator
        if estimator.per_token:
            output = self._per_token(cast(TokenEstimator, estimator), everything, counted, trained, folder)
            return replace(output, summary={**output.summary, **informative})
        groups, names = group_numbers(now.samples)
        shaped, mask = self._shaped(now, groups, history_of(names, [each.take(self._counts(each)) for each in earlier]))
        self._write(everything, counted, trained, shaped, folder)
        summary = {**_summary(everything.take(counted), shaped, mask), **_excluded(everything, counted), **informative}
        if section.kl_gate is not None:
            summary["gated_ratio"] = float((now.penalty != 0).double().mean())
        return Output(rows=len(counted), summary=summary)

    def _shaped(self, now: SampleRewards, groups: Tensor, history: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (N,) float32 advantages, and which groups' mean rewards are within bounds, (N,) bool."""
        section = self.config.advantage
        normalized = partial(self._normalized, now, groups, history)
        earned = EarnedBySamples(scores=now.total, groups=groups, normalized=normalized)
        advantages = estimated(cast(Group, self.context.plan.estimator), earned, section.estimator.name)
        if now.distances is not None:
            advantages = diversity_weighted(advantages, groups, self._checked(now.distances))
        shaped = shape_advantages(
            advantages,
            groups,
            mode=section.mode,
            best_of=section.best_of,
            clip=section.clip,
            soft_clip=section.soft_clip,
        )
        mask = groups_within(now.total, groups, low=section.group_mean_min, high=section.group_mean_max)
        return torch.where(mask, shaped, 0.0), mask

    def _per_token(
        self,
        estimator: TokenEstimator,
        everything: SampleRewards,
        counted: Tensor,
        trained: Tensor,
        folder: Path,
    ) -> Output:
        """Write an advantage per sample, the mean of its tokens', and those of tokens."""
        now = everything.take(trained)
        groups, _ = group_numbers(now.samples)
        tokens = TokenTables.read(self.context.store, self.inputs, everything.samples)
        kl_coef = self._kl_coef(estimator)
        advantages, columns, figures = tokens.estimate(estimator, now.total, groups, trained, kl_coef=kl_coef)
        self._write(everything, counted, trained, advantages, folder)
        write_rows("token_advantages", folder, columns)
        mask = torch.ones_like(now.total, dtype=torch.bool)
        statistics = _summary(everything.take(counted), advantages, mask)
        summary = {**statistics, **_excluded(everything, counted), **figures}
        return Output(rows=len(counted), summary=summary)

    def _kl_coef(self, estimator: TokenEstimator) -> float:
        """Return the weight of the KL in this epoch: adapted from the epoch before if the estimator adapts it."""
        *_, before = self.inputs
        if not estimator.adapts or before.kind != self._stage.spec.artifact:
            return estimator.kl_coef
        summary = self.context.store.require(before).summary
        return estimator.next_kl_coef(summary["kl_coef"], summary["kl"], int(summary["samples"]))

    def _write(
        self, everything: SampleRewards, counted: Tensor, trained: Tensor, advantages: Tensor, folder: Path
    ) -> None:
        """Write the rewards of the samples that count, and the advantages (M,) of those that are trained on."""
        columns = {
            **{name: everything.samples.column(name).combine_chunks() for name in _IDENTITY},
            "reward": _nullable(everything.total[counted], counted),
            "advantage": _nullable(advantages, trained),
        }
        write_rows("advantages", folder, columns, {"artifact": self._rolled_out})

    @property
    def _rolled_out(self) -> str:
        scored = next(ref for ref in self.inputs if ref.kind == "rewards")
        return str(origin_of(self.context.store, ArtifactRef.parse(self.context.store.require(scored).inputs[0])))

    def _counted(self, epoch: SampleRewards) -> Tensor:
        """Return which samples have a reward, (N,) bool: those that could be scored, or whose whole group could."""
        if bool(epoch.cut.all()):
            raise RewardError(
                f"advantage.overlong leaves out every text of epoch {self.epoch}: all were truncated. Raise "
                "rollout.tokens.max_new, or set exclude to false."
            )
        for section, part in zip(self.config.rewards, epoch.parts, strict=True):
            failed = part.isnan()
            if bool(failed.any()) and not section.excludes:
                first = epoch.samples.column("sample_id")[int(failed.nonzero()[0])]
                raise RewardError(
                    f"rewards: '{section.slot}' failed for {int(failed.sum())} samples of epoch {self.epoch}, {first} "
                    "the first, and its on_failure is 'stop'. Set it to 'exclude_sample' or 'exclude_group', or mend "
                    f"the reward and score again: '{self._scoring}'."
                )
        counted = self._counts(epoch)
        if not bool(counted.any()):
            raise RewardError(
                f"rewards: every sample of epoch {self.epoch} is left out, as a reward failed for it or for one of its "
                "group; the rewards' tables say why. Nothing can be learned from that: mend the reward and score "
                f"again: '{self._scoring}'."
            )
        return counted

    def _counts(self, epoch: SampleRewards) -> Tensor:
        """Return which samples of this or an earlier epoch have a part in statistics, (N,) bool."""
        counted, (groups, _) = ~epoch.cut, group_numbers(epoch.samples)
        for section, part in zip(self.config.rewards, epoch.parts, strict=True):
            failed = part.isnan()
            counted &= ~(torch.isin(groups, groups[failed]) if section.on_failure == "exclude_group" else failed)
        return counted

    def _truncated(self, shard: TrajectoryShard) -> list[bool]:
        modality, config = self._stage.modality, self.config
        return [modality.truncated(config, shard, row) for row in range(shard.table.num_rows)]

    def _informative(self, epoch: SampleRewards, counted: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return which samples are trained on where only some groups are, and how many groups could have been."""
        limit = self.config.advantage.informative
        if limit is None:
            return counted, {}
        groups, _ = group_numbers(epoch.samples)
        # Penalties differ where rewards are equal.
        rewards = weighted(epoch.parts, epoch.weights, like=epoch.total)
        saying = informative_groups(rewards, groups, counted)
        # An epoch that says nothing trains on nothing as it does elsewhere: all its advantages are 0.
        chosen = counted & torch.isin(groups, saying[:limit]) if len(saying) else counted
        return chosen, {"informative_groups": len(saying)}

    @property
    def _scoring(self) -> str:
        which = ["--run", self.config.run.name, "--epoch", self.epoch, *root_option(self.context.store.root.uri)]
        return command("flowmill", "stage", "score", *which, "--force")

    def _checked(self, distances: Tensor) -> Tensor:
        """Return the scores that weigh advantages."""
        if bool((distances < 0).any()):
            raise ConfigError(
                f"advantage.diversity is '{self.config.advantage.diversity}', but that monitor gave "
                f"{float(distances[distances < 0][0]):g} in epoch {self.epoch}: a score below 0 is no distance, and "
                "would turn advantages round. Name another monitor, or remove advantage.diversity."
            )
        return distances

    def _normalized(self, now: SampleRewards, groups: Tensor, history: Sequence[Tensor]) -> Tensor:
        section = self.config.advantage
        normalizer = Normalizer(
            # Running statistics have a pool of their own, and take only the floor from here.
            std="group" if section.std == "running" else section.std,
            epsilon=section.epsilon,
            floor=section.floor,
            unbiased=section.unbiased,
            mean=section.mean,
        )
        if section.std == "running":
            sizes = {"buffer": section.buffer, "min_count": section.min_count}
            return running_advantages(now.total, groups, history, normalizer, **sizes)
        if section.aggregation == "sum":
            return group_advantages(now.total, groups, normalizer)
        return gdpo_advantages(now.parts, now.weights, groups, normalizer, penalty=now.penalty)

    def _epochs(self) -> list[SampleRewards]:
        count, refs = self._scored, self.inputs
        scored = [ref for ref in refs if ref.kind == "rewards"]
        section = self.config.advantage
        rolled: Sequence[ArtifactRef | None] = [None] * self._count
        if section.kl_coef > 0 or section.overlong is not None:
            rolled = [ref for ref in refs if ref.kind == "trajectories"]
        drawn: Sequence[ArtifactRef | None] = [ref for ref in refs if ref.kind == "renders"] or [None] * self._count
        parts = [scored[start : start + count] for start in range(0, len(scored), count)]
        return [self._earned(*each) for each in zip(parts, rolled, drawn, strict=True)]

    def _earned(
        self, scored: Sequence[ArtifactRef], trajectories: ArtifactRef | None, drawn: ArtifactRef | None
    ) -> SampleRewards:
        tables = [read_rows(self.context.store, ref) for ref in scored]
        ids = tables[0].column("sample_id")
        for ref, table in zip(scored, tables, strict=True):
            if table.column("sample_id") != ids:
                raise CorruptError(f"{ref} scores other samples than {scored[0]}. Run 'flowmill stage score' again.")
        rewards, section = self.config.rewards, self.config.advantage
        penalty, weights = torch.zeros(len(ids), dtype=torch.float64), [reward.weight for reward in rewards]
        drawings = None if drawn is None else drawings_of(self.context.store, drawn, self.config, ids)
        parts = optimized_parts(rewards, tables[: len(rewards)])
        summed = weighted(parts, weights, like=penalty)
        if trajectories is not None and section.kl_coef > 0:
            # Mean over the trained steps.
            kl = figures_of_samples(self.context.store, trajectories, ids, "reference_kl", lambda kl: sum(kl) / len(kl))
            penalty = section.kl_coef * kl
        watched = [torch.tensor(table.column("reward").to_numpy()) for table in tables[len(rewards) :]]
        distances = None if section.diversity is None else watched.pop()
        if section.kl_gate is not None:
            penalty = torch.where(uncertain(summed, watched, section.kl_gate), penalty, 0.0)
        cut = torch.zeros(len(ids), dtype=torch.bool)
        if trajectories is not None and section.overlong is not None:
            over, longest = section.overlong, self._stage.modality.longest(self.config)
            assert longest is not None
            lengths = figures_of_samples(self.context.store, trajectories, ids, "log_probs", len)
            penalty = penalty - overlong_penalty(lengths, longest=longest, buffer=over.buffer, factor=over.factor)
            if over.exclude:
                cut = by_sample(self.context.store, trajectories, ids, self._truncated).bool()
        turns = turns_of(self.config)
        if drawings is not None and turns is not None:
            penalty = penalty + turns.cost * (drawings - 1)
        return SampleRewards(
            samples=tables[0],
            parts=parts,
            weights=weights,
            penalty=penalty,
            total=summed - penalty,
            cut=cut,
            distances=distances,
        )


def _nullable(values: Tensor, counted: Tensor) -> pa.Array:
    """Return (M,) values in the rows that count, null elsewhere, as (N,) float32."""
    full = np.zeros(len(counted), np.float32)
    full[counted.numpy()] = values.float().numpy()
    return pa.array(full, mask=~counted.numpy())


def _excluded(epoch: SampleRewards, counted: Tensor) -> dict[str, float]:
    """Return how many samples and whole groups are left out as a reward failed; nothing where none is."""
    failed = ~counted & ~epoch.cut
    if not bool(failed.any()):
        return {}
    groups, _ = group_numbers(epoch.samples)
    left = len(groups[~epoch.cut].unique()) - len(groups[counted].unique())
    return {"excluded_samples": int(failed.sum()), "excluded_groups": left}


def _summary(scored: SampleRewards, advantages: Tensor, remaining: Tensor) -> dict[str, float]:
    rewards = scored.total
    statistics = group_statistics(rewards, group_numbers(scored.samples)[0])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "group_std": float(statistics.std.mean()),
        "zero_std_ratio": float(statistics.constant.double().mean()),
        "filtered_ratio": float((~remaining).double().mean()),
        "abs_mean": float(advantages.abs().double().mean()),
    }
