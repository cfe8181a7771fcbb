"""What every trajectory store writes and reads.

A sample is a chain of S >= 0 trained transitions: ``states`` lists the denoising steps whose latents are stored,
``steps`` the S trained ones; step i leads from the state i to the state i + 1. An evaluation image is a chain of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One generated sample."""

    sample_id: str
    """Unique within the artifact; no dots (WebDataset splits names at the first one)."""
    prompt_id: str
    """Identity of the prompt."""
    group_id: str
    """Samples that are compared with each other: the prompt's, or with branching those of one step."""
    prompt: str
    """The prompt."""
    epoch: int
    """Epoch of the rollout."""
    replica: int
    """Position within the group."""
    seed: int
    """Seed of the initial noise."""
    policy: str
    """Artifact of the policy that made it."""
    sigmas: Sequence[float]
    """Noise levels of the whole schedule, [T + 1] from 1 to 0."""
    media: np.ndarray
    """(H, W, 3) uint8 image."""
    steps: Sequence[int] = ()
    """Trained steps, [S]."""
    states: Sequence[int] = ()
    """Steps whose latents are stored, [N]."""
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """(S,) float32 behavior log-probs, mean over latent dims."""
    reference_kl: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """(S,) float32 KL of each trained step to the base model's, or (0,) where none was computed."""
    latents: np.ndarray | None = None
    """(N, ...) float32 or float16 latents, one per stored state."""
    means: np.ndarray | None = None
    """(S, ...) float32 means of the behavior policy's trained steps, for algorithms that compare means."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the prompt source, for rewards."""


class TrajectoryShard(Protocol):
    """A shard opened for reading."""

    table: pa.Table
    """Everything but payloads, schema ``storage.schema.SAMPLES``."""

    def latents(self, row: int) -> np.ndarray:
        """Return the (N, ...) latents of a row, without decoding; read-only."""
        ...

    def means(self, row: int) -> np.ndarray:
        """Return the (S, ...) float32 step means of a row, without decoding; read-only.

        Raises:
            CorruptError: none are stored.
        """
        ...

    def media(self, row: int) -> np.ndarray:
        """Return the (H, W, 3) uint8 image of a row."""
        ...


class TrajectoryStore(Protocol):
    """Writes and opens shards. Equal samples give equal bytes."""

    def write(self, folder: Path, samples: Sequence[Sample]) -> None:
        """Write all samples of one shard into an empty folder."""
        ...

    def open(self, folder: Path) -> TrajectoryShard:
        """Open a committed shard's folder.

        Raises:
            CorruptError: a table or payload is not what the schema says.
        """
        ...
