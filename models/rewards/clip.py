"""Rewards from CLIP embeddings: similarity to the prompt (PickScore, CLIP score) or an image, and aesthetics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flowmill.configs.path_types import ColumnFolderPlace, FilePlace, ModelPlace
from flowmill.models.image_files import open_picture
from flowmill.models.rewards.base import Metadata, Needs, Scores, Sources
from flowmill.models.rewards.device_placement import settled
from flowmill.models.rewards.differentiable import processed
from flowmill.models.rewards.pretrained import Pretrained, load_pretrained
from flowmill.models.rewards.similarity import pixel_similarity, sized_as, structural_similarity
from flowmill.models.rewards.weight_files import WeightsFile
from flowmill.models.text.control_tokens import as_texts

CLIP_L = "openai/clip-vit-large-patch14"
#: Divisors of the scaled cosines, by reward and convention.
_PICK_SCALE, _CLIP_SCALE = 26.0, 30.0
_HEAD = (
    "Convert the published sac+logos+ava1-l14-linearMSE.pth where you trust it: safetensors.torch.save_file("
    "torch.load(FILE, weights_only=True), 'aesthetic.safetensors')."
)


@dataclass(kw_only=True)
class ClipEmbeddings(Pretrained):
    """A CLIP model with its own processor."""

    #: So few rows per call fit next to a model that samples.
    needs: ClassVar[Needs] = Needs(media="images", accelerated=True, batch_size=16)
    classes: ClassVar[tuple[str, str]] = ("CLIPModel", "CLIPProcessor")
    """Classes of model and processor in transformers."""

    model: ModelPlace
    """Folder, or id on the hub, of a CLIP model."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the weights."""

    def __post_init__(self) -> None:
        self._device = self.chosen()
        self._clip = settled(self._load(), self._device, getattr(torch, self.dtype))
        path, revision = self._processor_source()
        self._processor = load_pretrained(self.classes[1], path, revision, reward=self.name)

    def _load(self) -> Any:
        return self.loaded(self.classes[0])

    def _processor_source(self) -> tuple[str, str | None]:
        return self.model, self.revision

    def of_images(self, images: np.ndarray | Sequence[np.ndarray]) -> Tensor:
        """Return (B, D) float32 embeddings of length 1 of (H, W, 3) uint8 images."""
        pixels = self._processor.image_processor(list(images), return_tensors="pt")["pixel_values"]
        return self._seen(pixels)

    def of_smooth(self, images: Tensor) -> Tensor:
        """Return (B, D) float32 embeddings of length 1, with a gradient, of (B, 3, H, W) images of about 0 to 1."""
        return self._seen(processed(images, self._processor.image_processor))

    def _seen(self, pixels: Tensor) -> Tensor:
        output = self._clip.get_image_features(pixels.to(self._device, self._clip.dtype))
        return nn.functional.normalize(output.pooler_output.float(), dim=-1)

    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """Return (B, D) float32 embeddings of length 1; texts too long for the model are truncated, as peers do."""
        most = self._clip.config.text_config.max_position_embeddings
        tokens = self._processor.tokenizer(
            as_texts(self._processor.tokenizer, texts),
            padding="max_length",
            truncation=True,
            max_length=most,
            return_tensors="pt",
        )
        output = self._clip.get_text_features(**tokens.to(self._device))
        return nn.functional.normalize(output.pooler_output.float(), dim=-1)


@dataclass(kw_only=True)
class PromptLikeness(ClipEmbeddings):
    """The cosine of an image and its prompt, times a factor."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image."""
        cosines = _array((self.of_images(media) * self.of_texts(prompts)).sum(-1))
        return Scores(cosines * np.float32(self.factor()))

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Return one score per (3, H, W) image."""
        return (self.of_smooth(media) * self.of_texts(prompts)).sum(-1) * self.factor()

    def factor(self) -> float:
        """Return the factor of the convention."""
        return 1.0


@dataclass(kw_only=True)
class PickScore(PromptLikeness):
    """PickScore (arXiv 2305.01569): how much people prefer an image for a prompt. ``scaled``: exp(logit_scale) cos /
    26, as Flow-GRPO's ``pickscore_scorer.py``, DiffusionNFT and Flow-Factory; ``cosine``: the cosine alone, as
    DanceGRPO has it."""

    name: ClassVar[str] = "pickscore"

    model: ModelPlace = "yuvalkirstain/PickScore_v1"
    processor: ModelPlace = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Folder or id of the processor, which the model's repository lacks."""
    processor_revision: str | None = None
    """Commit, tag or branch of the processor."""
    convention: Literal["scaled", "cosine"] = "scaled"
    """The scale, as above."""

    def factor(self) -> float:
        """Return the factor of the convention."""
        return float(self._clip.logit_scale.float().exp()) / _PICK_SCALE if self.convention == "scaled" else 1.0

    def _processor_source(self) -> tuple[str, str | None]:
        return self.processor, self.processor_revision


@dataclass(kw_only=True)
class ClipScore(PromptLikeness):
    """Cosine of image and prompt (arXiv 2104.08718). ``cosine``: as Flow-Factory and, but for rounding, DiffusionNFT
    (logits / 100) have it; ``flow_grpo``: logits / 30, as Flow-GRPO's ``clip_scorer.py``, 3.3 times as much."""

    name: ClassVar[str] = "clip_score"

    model: ModelPlace = CLIP_L
    convention: Literal["cosine", "flow_grpo"] = "cosine"
    """The scale, as above."""

    def factor(self) -> float:
        """Return the factor of the convention."""
        return float(self._clip.logit_scale.float().exp()) / _CLIP_SCALE if self.convention == "flow_grpo" else 1.0


@dataclass(kw_only=True)
class ImageSimilarity(ClipEmbeddings):
    """Similarity of an image to the one that the prompt's metadata name, or to its source images.

    ``embedding``: cosine of CLIP's embeddings, as Flow-GRPO's ``image_similarity`` has it; ``pixels``: 1 - root mean
    square difference over 255; ``ssim``: structural similarity of luma (Wang et al. 2004). The last two load no model,
    and scale the other image to the size of the scored one. With several sources the score is the mean.
    """

    name: ClassVar[str] = "image_similarity"

    model: ModelPlace = CLIP_L
    column: str = "image"
    """Column of the prompt source with paths of images."""
    folder: ColumnFolderPlace = "."
    """Folder that relative paths start from."""
    to: Literal["column", "source"] = "column"
    """Compare with the image that a column names, or with the prompt's source images."""
    by: Literal["embedding", "pixels", "ssim"] = "embedding"
    """Measure of similarity, as above."""

    def __post_init__(self) -> None:
        if self.by == "embedding":
            super().__post_init__()

    @staticmethod
    def needs_for(options: Mapping[str, Any]) -> Needs:
        """Return the needs under some options: the accelerator for a model, references to compare with a source."""
        references = options.get("to", "column") == "source"
        if options.get("by", "embedding") != "embedding":
            return Needs(media="images", references=references)
        return replace(ClipEmbeddings.needs, references=references)

    @staticmethod
    def follows(options: Mapping[str, Any]) -> bool:
        """Return whether scores have a gradient: only those by embedding to an image that a column names."""
        return (options.get("to", "column"), options.get("by", "embedding")) == ("column", "embedding")

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata, references: Sources = ()) -> Scores:
        """Return one score per (H, W, 3) uint8 image; raise ValueError if a prompt names no image, OSError if an image
        cannot be read."""
        if self.to == "column":
            targets = [[self._target(row, prompt)] for row, prompt in zip(metadata, prompts, strict=True)]
        else:
            targets = [list(images) for images in references]
        # One row per pair of an image and one that it is compared with.
        rows = [row for row, images in enumerate(targets) for _ in images]
        likeness = self._likeness(media, rows, [image for images in targets for image in images])
        sums = np.zeros(len(media), np.float64)
        np.add.at(sums, rows, likeness)
        return Scores((sums / np.bincount(rows, minlength=len(media))).astype(np.float32))

    def _likeness(self, media: np.ndarray, rows: Sequence[int], others: Sequence[np.ndarray]) -> np.ndarray:
        """Return the similarities of the images at (P,) rows to (P,) others."""
        if self.by == "embedding":
            return _array((self.of_images(media)[list(rows)] * self.of_images(others)).sum(-1))
        compare = _BY[self.by]
        pairs = ((media[row], sized_as(other, media[row])) for row, other in zip(rows, others, strict=True))
        return np.array([compare(one, other) for one, other in pairs])

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Return one score per (3, H, W) image."""
        targets = [self._target(row, prompt) for row, prompt in zip(metadata, prompts, strict=True)]
        return (self.of_smooth(media) * self.of_images(targets)).sum(-1)

    def _target(self, metadata: Mapping[str, Any], prompt: str) -> np.ndarray:
        path = metadata.get(self.column)
        if not isinstance(path, str):
            raise ValueError(f"prompt {prompt!r} has no path of an image in column '{self.column}', but {path!r}")
        return open_picture(Path(self.folder) / path)


#: Functions that compare two (H, W, 3) uint8 images without a model.
_BY = {"pixels": pixel_similarity, "ssim": structural_similarity}


@dataclass(kw_only=True)
class Aesthetic(ClipEmbeddings):
    """LAION's improved aesthetic predictor (sac+logos+ava1-l14-linearMSE): raters' taste, about 1 to 10; no prompt.
    Linear layers on CLIP ViT-L/14's embedding of length 1 (improved-aesthetic-predictor, ``simple_inference.py``)."""

    name: ClassVar[str] = "aesthetic"

    model: ModelPlace = CLIP_L
    head: FilePlace
    """Safetensors file of the perceptron."""

    def __post_init__(self) -> None:
        super().__post_init__()
        file = WeightsFile(reward=self.name, file=self.head, option="head", remedy=_HEAD)
        self._layers = file.perceptron(file.read(), self._clip.config.projection_dim).to(self._device)

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image."""
        return Scores(_array(self._layers(self.of_images(media)).squeeze(-1)))

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Return one score per (3, H, W) image."""
        return self._layers(self.of_smooth(media)).squeeze(-1)


def _array(values: Tensor) -> np.ndarray:
    return values.float().cpu().numpy()
