"""The critic of a run in one process, with the artifact whose weights it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from flowmill.models.weights.sharding import Sharding
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.weight_sources import critic_files, critic_folder
from flowmill.tasks.runs.seeds import derive

if TYPE_CHECKING:
    from flowmill.models.policies.trainable import Trainable
    from flowmill.tasks.runs.context import RunContext


class LoadedCritic:
    """Makes a critic on first use, and keeps it until ``forget``."""

    def __init__(self, store: ArtifactStore, make: Callable[[], Trainable]) -> None:
        """Bind to the store of critics, and to the function that makes a fresh critic."""
        self._store, self._make = store, make
        self._holds: str | None = None
        self.loaded: Trainable | None = None
        """The critic, after its first use."""

    def of(self, ref: ArtifactRef) -> Trainable:
        """Return the critic that was trained with a policy artifact; a fresh critic if there is none."""
        if self.loaded is None or self._holds != str(ref):
            files = critic_files(self._store, ref)
            if files is None or self.loaded is None:
                self.loaded = self._make()
            self.loaded.scatter()
            if files is not None:
                self.loaded.read(files)
            self._holds = str(ref)
        return self.loaded

    def borrow(self, ref: ArtifactRef) -> Trainable:
        """Return the critic of a policy artifact for training; it then belongs to no artifact."""
        critic = self.of(ref)
        critic.scatter()
        self._holds = None
        return critic

    def keep(self, ref: ArtifactRef) -> None:
        """Record that the borrowed critic now belongs to a policy artifact."""
        if self.loaded is not None:
            self._holds = str(ref)

    def forget(self) -> None:
        """Drop it."""
        self.loaded = self._holds = None


def fresh_critic(context: RunContext, device: torch.device, sharding: Sharding | None) -> Trainable:
    """Return a critic from its model's files and the run's seed; sharded over the ranks with ``sharding``."""
    config, section, family = context.config, context.config.critic, context.plan.family
    dtype = getattr(torch, section.dtype or config.model.dtype)
    settings = family.settings_for(config, dtype=dtype, device=device, empty=False)
    context.check_critic()
    folder = context.base_folder if section.path is None else critic_folder(section.path)
    critic: Trainable = family.load_critic(
        folder,
        settings,
        like=context.base_folder,
        own=section.backbone == "own",
        lora=context.plan.lora,
        seed=derive(config.run.seed, "critic"),
        log_probs=section.log_probs,
    )
    if sharding is not None:
        critic.shard(sharding)
    return critic
