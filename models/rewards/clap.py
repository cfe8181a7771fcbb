"""CLAP (arXiv 2211.06687): the similarity of a sound and its prompt, as CLIP gives it for images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flowmill.configs.path_types import ModelPlace
from flowmill.models.rewards.base import Metadata, Needs, Scores
from flowmill.models.rewards.device_placement import settled
from flowmill.models.rewards.pretrained import Pretrained
from flowmill.models.text.control_tokens import as_texts

#: Sample rate of published models, in Hz.
_RATE = 48_000


@dataclass(kw_only=True)
class Clap(Pretrained):
    """Cosine of a sound and its prompt (LAION's CLAP). Channels are averaged. A sound longer than the model's window of
    ten seconds is cut into pieces of that length, and its embedding is the mean of theirs."""

    name: ClassVar[str] = "clap"
    needs: ClassVar[Needs] = Needs(media="sounds", rate=_RATE, accelerated=True, batch_size=16)

    model: ModelPlace = "laion/clap-htsat-unfused"
    """Folder, or id on the hub, of a CLAP model."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the weights."""

    def __post_init__(self) -> None:
        """Load the model; raise ValueError if it has another sample rate."""
        self._device = self.chosen()
        self._clap = settled(self.loaded("ClapModel"), self._device, getattr(torch, self.dtype))
        self._processor = self.loaded("ClapProcessor")
        rate = self._processor.feature_extractor.sampling_rate
        if rate != _RATE:
            raise ValueError(f"model '{self.model}' hears {rate} samples a second; published ones hear {_RATE}.")

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (N, C) float32 sound of 48,000 samples a second."""
        cosines = (self.of_sounds(media) * self.of_texts(prompts)).sum(-1)
        return Scores(cosines.float().cpu().numpy())

    @torch.inference_mode()
    def of_sounds(self, media: np.ndarray) -> Tensor:
        """Return (B, D) float32 embeddings of length 1 of (B, N, C) sounds."""
        heard, longest = media.mean(axis=2), self._processor.feature_extractor.nb_max_samples
        pieces = [self._heard(heard[:, start : start + longest]) for start in range(0, heard.shape[1], longest)]
        return nn.functional.normalize(torch.stack(pieces).mean(0), dim=-1)

    def _heard(self, sounds: np.ndarray) -> Tensor:
        """Return (B, D) float32 embeddings of (B, N) sounds, no longer than the window."""
        inputs = self._processor.feature_extractor(list(sounds), sampling_rate=_RATE, return_tensors="pt")
        features = inputs["input_features"].to(self._device, self._clap.dtype)
        # No piece is longer than the model's window; for models with fusion the processor says so of a random one.
        whole = torch.zeros(len(sounds), 1, dtype=torch.bool, device=self._device)
        output = self._clap.get_audio_features(input_features=features, is_longer=whole)
        return nn.functional.normalize(output.pooler_output.float(), dim=-1)

    @torch.inference_mode()
    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """Return (B, D) float32 embeddings of length 1; texts too long for the model are truncated."""
        most = self._clap.config.text_config.max_position_embeddings - 2
        options = {"padding": "max_length", "truncation": True, "max_length": min(most, 77), "return_tensors": "pt"}
        tokens = self._processor.tokenizer(as_texts(self._processor.tokenizer, texts), **options)
        output = self._clap.get_text_features(**tokens.to(self._device))
        return nn.functional.normalize(output.pooler_output.float(), dim=-1)
