"""HPS v2 and v2.1, from a safetensors copy of the published file, which has open_clip's parameter names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flowmill.configs.path_types import FilePlace, ModelPlace
from flowmill.models.rewards.clip import PromptLikeness
from flowmill.models.rewards.pretrained import load_pretrained
from flowmill.models.rewards.weight_files import WeightsFile

#: Names in open_clip's models and in transformers' CLIPModel, first match first.
_CLIP_NAMES = (
    (r"visual\.class_embedding", "vision_model.embeddings.class_embedding"),
    (r"visual\.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    (r"visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"positional_embedding", "text_model.embeddings.position_embedding.weight"),
    (r"ln_final\.", "text_model.final_layer_norm."),
    (r"transformer\.resblocks\.", "text_model.encoder.layers."),
)
_CLIP_PARTS = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.out_proj.": ".self_attn.out_proj.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}


@dataclass(kw_only=True)
class Hps(PromptLikeness):
    """Human Preference Score v2 and v2.1 (arXiv 2306.09341): cosine of image and prompt. The model is a CLIP ViT-H/14
    trained on human preferences. It sees the whole image, in a black square (``hpsv2/img_score.py``). ``cosine``: as
    DanceGRPO and DiffusionNFT have it; ``percent``: times 100, as papers report it."""

    name: ClassVar[str] = "hpsv2"

    model: ModelPlace = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Folder or hub id of its base model, a CLIP model, for its sizes and processor."""
    weights: FilePlace
    """Safetensors copy of ``HPS_v2.1_compressed.pt`` or ``HPS_v2_compressed.pt`` (xswu/HPSv2)."""
    convention: Literal["cosine", "percent"] = "cosine"
    """The scale, as above."""

    def of_images(self, images: np.ndarray | Sequence[np.ndarray]) -> Tensor:
        """Return (B, D) float32 embeddings of length 1 of (H, W, 3) uint8 images of one size."""
        return self.of_smooth(torch.from_numpy(np.stack(list(images))).permute(0, 3, 1, 2).float() / 255)

    def of_smooth(self, images: Tensor) -> Tensor:
        """Return (B, D) float32 embeddings of length 1, with a gradient, of (B, 3, H, W) images of about 0 to 1."""
        return super().of_smooth(_letterboxed(images, self._processor.image_processor.crop_size["height"]))

    def factor(self) -> float:
        """Return the factor of the convention."""
        return 100.0 if self.convention == "percent" else 1.0

    def _load(self) -> Any:
        from transformers import CLIPModel

        model = CLIPModel(load_pretrained("CLIPConfig", self.model, self.revision, reward=self.name))
        file = WeightsFile(reward=self.name, file=self.weights)
        file.fill(model, file.read(), clip_names)
        return model


def _letterboxed(images: Tensor, edge: int) -> Tensor:
    """Return (B, 3, H, W) images scaled to a longer side of ``edge``, with black on both sides of the shorter one
    (``ResizeMaxSize`` of ``hpsv2/src/open_clip/transform.py``)."""
    scale = edge / max(images.shape[-2:])
    height, width = (round(side * scale) for side in images.shape[-2:])
    if (height, width) != tuple(images.shape[-2:]):
        images = nn.functional.interpolate(images, size=(height, width), mode="bicubic", antialias=True)
    left, top = (edge - width) // 2, (edge - height) // 2
    return nn.functional.pad(images, (left, edge - width - left, top, edge - height - top))


def clip_names(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Return an open_clip tensor by its names in CLIPModel (``convert_clip_original_pytorch_to_hf.py``)."""
    if name == "logit_scale":
        return {name: tensor}
    if name in ("visual.proj", "text_projection"):
        return {("visual" if name == "visual.proj" else "text") + "_projection.weight": tensor.T}
    for pattern, inner in _CLIP_NAMES:
        match = re.match(pattern, name)
        if match:
            name = inner + name[match.end() :]
            break
    for outer, inner in _CLIP_PARTS.items():
        name = name.replace(outer, inner)
    fused = re.fullmatch(r"(.*)\.attn\.in_proj_(weight|bias)", name)
    if fused is None:
        return {name: tensor}
    parts = zip("qkv", tensor.chunk(3), strict=True)
    return {f"{fused[1]}.self_attn.{letter}_proj.{fused[2]}": part for letter, part in parts}
