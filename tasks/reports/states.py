"""Intermediate states of samples, decoded for people."""

from __future__ import annotations

import numpy as np

from storage.layout import ArtifactRef
from tasks.metrics.samples import arrays_of
from tasks.modalities.modality import make_kind
from tasks.runs.context import RunContext
from tasks.runtime.host import ModelHost


class States:
    """Shows the intermediate states of samples: stored latents, decoded by the base model's decoder."""

    def __init__(self, context: RunContext) -> None:
        """Load the decoder.

        Args:
            context: the run; not a read-only one, as its record may name code.

        Raises:
            StoreError: samples of this kind have no visible states.
        """
        self._store = context.store
        self._decode = make_kind(context.config).decoder(context.config, ModelHost(context))

    def of(self, ref: ArtifactRef, sample: str) -> np.ndarray:
        """Return the decoded image of every stored state of a sample, (N, H, W, 3) or (N, F, H, W, 3) uint8.

        Raises:
            StoreError: the artifact lacks the sample.
            CorruptError: no latents are stored, or a file is damaged.
        """
        return self._decode(arrays_of(self._store, ref, "latents", [sample])[sample])
