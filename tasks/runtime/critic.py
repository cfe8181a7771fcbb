"""The critic of a run in one process, with the artifact whose weights it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from models.devices import chosen_device
from models.library_loading import quiet_libraries
from models.policies.base import Policy
from models.weights.sharding import Sharding
from storage.artifacts.commit import ArtifactStore
from storage.layout import ArtifactRef
from tasks.inputs.components import lora_spec
from tasks.inputs.weight_sources import critic_files, critic_folder
from tasks.runs.seeds import derive

if TYPE_CHECKING:
    from models.policies.trainable import Trainable
    from tasks.runs.context import RunContext


class HeldCritic:
    """Makes a critic on first use, and keeps it until ``forget``."""

    def __init__(self, store: ArtifactStore, make: Callable[[], Trainable]) -> None:
        """Bind to the store of critics, and to the function that makes a fresh critic."""
        self._store, self._make = store, make
        self._holds: str | None = None
        self.held: Trainable | None = None
        """The critic, after its first use."""

    def of(self, ref: ArtifactRef) -> Trainable:
        """Return the critic that was trained with a policy artifact; a fresh critic if there is none.

        Raises:
            ConfigError: the family has no critics.
        """
        if self.held is None or self._holds != str(ref):
            files = critic_files(self._store, ref)
            if files is None or self.held is None:
                self.held = self._make()
            self.held.scatter()
            if files is not None:
                self.held.read(files)
            self._holds = str(ref)
        return self.held

    def borrow(self, ref: ArtifactRef) -> Trainable:
        """Return the critic of a policy artifact for training; it then belongs to no artifact."""
        found = self.of(ref)
        found.scatter()
        self._holds = None
        return found

    def keep(self, ref: ArtifactRef) -> None:
        """Record that the borrowed critic now belongs to a policy artifact."""
        if self.held is not None:
            self._holds = str(ref)

    def forget(self) -> None:
        """Drop it."""
        self.held = self._holds = None


def fresh_critic(
    context: RunContext, family: type[Policy], device: torch.device, sharding: Sharding | None
) -> Trainable:
    """Return a critic from its model's files and the run's seed; sharded over the ranks with ``sharding``.

    Raises:
        ConfigError: the family has no critics, or the critic's model and the policy have different tokens.
    """
    config, section = context.config, context.config.critic
    quiet_libraries()
    dtype = getattr(torch, section.dtype or config.model.dtype)
    place = device if section.device is None else chosen_device(section.device, label="critic.device")
    settings = family.settings_for(config, dtype=dtype, device=place, empty=False)
    folder = context.base_folder if section.path is None else critic_folder(section.path)
    made: Trainable = family.load_critic(
        folder,
        settings,
        like=context.base_folder,
        own=section.backbone == "own",
        lora=lora_spec(config, family),
        seed=derive(config.run.seed, "critic"),
        log_probs=section.log_probs,
    )
    if sharding is not None:
        made.shard(sharding)
    return made
