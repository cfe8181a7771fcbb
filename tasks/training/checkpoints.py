"""Checkpoints within an epoch, written and committed while training continues."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from flowmill.storage.artifacts.checkpoints import commit_checkpoint
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.runs.background_commit import BackgroundCommit
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.training.loop import TrainerState
from flowmill.tasks.training.state import StateCopy


class Checkpoints:
    """Takes one checkpoint at a time; the next waits until the previous one is committed."""

    def __init__(self, store: ArtifactStore, ref: ArtifactRef, ranks: Ranks) -> None:
        """Bind to the policy that is trained.

        Args:
            store: where checkpoints are committed.
            ref: the policy.
            ranks: the ranks that train together, on a separate channel.
        """
        self._store, self._ref, self._ranks = store, ref, ranks
        self._behind = BackgroundCommit()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for pending writes; after an error of training only if there are no other ranks.

        Other ranks may have failed too, and waiting for them would delay this rank's error.
        """
        if error is None:
            self._behind.wait()
        self._behind.close(wait=error is None or self._ranks.world == 1)

    def take(self, state: TrainerState, update: int) -> None:
        """Copy the state after ``update`` updates and commit it in the background; all ranks do this together."""
        # Wait before copying: memory suffices for one copy.
        self._behind.wait()
        with ExitStack() as stack:
            folder = stack.enter_context(self._store.root.staging())
            copy = StateCopy(state, folder, self._ranks)
            resources = stack.pop_all()

        def commit() -> None:
            with resources:
                copy.finish()
                commit_checkpoint(self._store, self._ref, update, folder, self._ranks)

        self._behind.do(commit)
