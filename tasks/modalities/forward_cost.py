"""The cost of an epoch and of a run, counted from the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one epoch and of the whole run, counted from the config."""

    prompts: Mapping[str, int]
    """Prompts by split."""
    samples_per_epoch: int
    """Images, videos or texts generated per epoch."""
    rollout_forwards: int
    """Rows through the policy per epoch's rollouts (twice as many with guidance)."""
    optimize_rows: int
    """Maximum (sample, step) rows trained per epoch; training skips rows of zero-advantage groups."""
    optimize_forwards: int
    """Maximum rows through policy and critic with gradient per epoch, guidance included."""
    reference_forwards: int
    """Rows through the base model per epoch, while the policy is trained."""
    value_forwards: int = 0
    """Rows through critic and base model per epoch, in the values stage."""
    evaluate_forwards: int
    """Rows through the policy per evaluation."""
    validate_forwards: int = 0
    """Rows through policy and base model per evaluation, for the loss on held-out rows of data."""
    updates: int
    """Optimizer updates in the whole run."""
    shards_per_epoch: int
    """Trajectory shards per epoch."""
    latent_bytes_per_epoch: int | None
    """Bytes of stored latents per epoch, predictions included; None if the model's latent shape is unknown."""
    latent_bytes: int | None
    """Bytes of stored latents in the whole run."""
    stores_latents: bool = True
    """Whether samples have latents at all."""
    evaluations: int
    """Evaluations in the whole run."""
    reference: bool
    """Whether the base model's velocities are needed."""
    drawing_forwards: int = 0
    """Rows through the model that renders texts per epoch (twice as many with guidance)."""
    depicting_forwards: int = 0
    """Rows through the model that renders texts per evaluation."""

    @property
    def latent_bytes_per_million(self) -> int | None:
        """Bytes of stored latents per million samples."""
        per_epoch = self.latent_bytes_per_epoch
        return None if per_epoch is None else round(per_epoch / self.samples_per_epoch * 1e6)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)
