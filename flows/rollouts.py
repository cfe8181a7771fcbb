"""Rollouts and their scores: shards are scored while others are rolled out, possibly epochs ahead of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from flowmill.configs.rewards import RewardSection
from flowmill.flows.stages import LOOKING, Future, TaskExecutor, run_stage
from flowmill.tasks.execution.session import Session
from flowmill.tasks.inputs.renderer import reads_images
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.rollout import RolloutStage
from flowmill.tasks.stages.score import ScoreStage
from flowmill.tasks.stages.stage_run import StageRun

#: Shards scored in less time than this share a task; slower ones get a task each, so that they run concurrently.
_QUICK_S = 0.2


class Rollouts:
    """The rollouts of a run and their scores."""

    def __init__(self, session: Session) -> None:
        self._session, self._plan = session, session.context.plan
        self._begun: dict[int, EpochRollout] = {}

    def complete(self, epoch: int) -> None:
        """Complete an epoch's rollouts and scores; start those of later epochs that other processes make meanwhile.

        Rewards that read rendered images are scored after the rollouts.
        """
        if self._plan.has_data:
            return
        for upcoming in self._plan.rollouts_from(epoch):
            if upcoming not in self._begun:
                for node in self._plan.before_rollout(upcoming):
                    run_stage(self._session, node)
                config = self._plan.config
                following = [section for section in config.scored if not reads_images(config, section)]
                self._begun[upcoming] = EpochRollout(self._session, upcoming, following)
        self._begun.pop(epoch).finish()
        for node in self._plan.rendered(epoch):
            run_stage(self._session, node)


class EpochRollout:
    """The rollout of one epoch, and its scores."""

    def __init__(self, session: Session, epoch: int, rewards: Sequence[RewardSection]) -> None:
        """Bind to an epoch whose policy exists; if other processes do the work, they start."""
        self._session, self._tasks, self._ledger = session, session.executor(TaskExecutor), session.context.ledger
        self._stage = cast(RolloutStage, session.stage(Node(epoch, "rollout")))
        self._rollout = StageRun(self._stage)
        self._scores = [StageRun(self._following(epoch, section.slot)) for section in rewards]
        self._shards: dict[str, Future] = {}
        self._scored: list[dict[str, Future]] = [{} for _ in self._scores]
        if self._tasks.is_elsewhere(self._stage):
            self._begin()

    def finish(self) -> None:
        """Do the remaining work and complete the artifacts."""
        if self._tasks.is_elsewhere(self._stage):
            self._tasks.wait(self._rollout, self._shards)
            self._rollout.finish()
            with self._ledger.waiting():
                for run, futures in zip(self._scores, self._scored, strict=True):
                    self._tasks.wait(run, futures)
        else:
            self._work()
        for run in self._scores:
            run.finish()

    def _begin(self) -> None:
        """Submit all shards; each score waits for its rollout."""
        self._shards = {shard.name: self._tasks.submit(self._rollout, [shard]) for shard in self._rollout.pending()}
        for run, futures in zip(self._scores, self._scored, strict=True):
            for shard in run.pending():
                parts = cast(ScoreStage, run.stage).parts_of(shard)
                after = [self._shards[name] for name in parts if name in self._shards]
                futures[shard.name] = self._tasks.submit(run, [shard], after=after)

    def _work(self) -> None:
        """Roll out here or on the ranks, scoring each shard on threads or processes once it is committed.

        Rewards that run on the ranks are scored afterwards.
        """
        rollout, futures = self._rollout, list[Future]()
        together = [run for run in self._scores if self._tasks.is_spread(run.stage)]
        left = {
            run.stage.slot: {shard.name: shard for shard in run.pending()}
            for run in self._scores
            if run not in together
        }

        def score(names: Sequence[str]) -> None:
            for run in self._scores:
                waiting = left.get(run.stage.slot, {})
                shards = [waiting.pop(name) for name in names if name in waiting]
                quick = self._ledger.typical(run.stage.name) < _QUICK_S
                parts = [shards] if quick else [[shard] for shard in shards]
                futures.extend(self._tasks.submit(run, part) for part in parts if part)

        due = rollout.pending()
        ahead = {each.name for each in due}
        score([each.name for each in rollout.stage.shards() if each.name not in ahead])
        self._tasks.run(rollout, due, replace(LOOKING, on_commit=score))
        rollout.finish()
        # Score shards that combine several rollout shards.
        score([name for waiting in left.values() for name in waiting])
        with self._ledger.waiting():
            for run in together:
                self._tasks.run(run, run.pending())
            for future in futures:
                self._tasks.wait_for(future, f"scores of {rollout.stage.node}")

    def _following(self, epoch: int, slot: str) -> ScoreStage:
        """Return the stage that scores the rollout while it is running."""
        stage = cast(ScoreStage, self._session.stage(Node(epoch, "score", slot)))
        stage.follow(self._stage)
        return stage
