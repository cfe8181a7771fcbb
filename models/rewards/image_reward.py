"""ImageReward, from a safetensors copy of the published file, which has BLIP's parameter names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flowmill.configs.path_types import FilePlace, ModelPlace
from flowmill.models.devices import chosen_device, local_rank
from flowmill.models.rewards.base import Metadata, Needs, Scores
from flowmill.models.rewards.device_placement import settled
from flowmill.models.rewards.differentiable import processed
from flowmill.models.rewards.pretrained import load_pretrained
from flowmill.models.rewards.sizes import Takes, transformer_takes
from flowmill.models.rewards.weight_files import WeightsFile
from flowmill.models.text.control_tokens import as_texts

#: Mean and standard deviation of ImageReward's scores on its own data (``ImageReward.py``).
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072
#: Maximum number of text tokens in ImageReward's training.
_TOKENS = 35
#: Width of an attention head of BLIP's image and text encoders.
_HEAD = 64
#: Names in BLIP's ViT and in transformers' BlipVisionModel.
_VISION_PARTS = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "blocks.": "encoder.layers.",
    ".attn.qkv.": ".self_attn.qkv.",
    ".attn.proj.": ".self_attn.projection.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    "norm.": "post_layernorm.",
}


@dataclass(kw_only=True)
class ImageReward:
    """ImageReward v1.0 (arXiv 2304.05977): raters' preference, standardized, by BLIP's cross-attending text encoder."""

    name: ClassVar[str] = "imagereward"
    needs: ClassVar[Needs] = Needs(media="images", accelerated=True, batch_size=16)

    weights: FilePlace
    """Safetensors copy of ``ImageReward.pt`` (THUDM/ImageReward)."""
    tokenizer: ModelPlace = "google-bert/bert-base-uncased"
    """Folder or hub id of the tokenizer."""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of the tokenizer."""
    device: str = "auto"
    """Torch device, or auto."""

    def __post_init__(self) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig, CLIPImageProcessor
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        self._device = chosen_device(self.device, local_rank(), label="device of reward 'imagereward'")
        file = WeightsFile(reward=self.name, file=self.weights)
        stored = file.read()
        vision, text, head = (_below(stored, part) for part in ("blip.visual_encoder.", "blip.text_encoder.", "mlp."))
        try:
            sizes = _vision_sizes(vision)
            vision_model = BlipVisionModel(BlipVisionConfig(**sizes, layer_norm_eps=1e-6, hidden_act="gelu"))
            text_model = BlipTextModel(BlipTextConfig(**_text_sizes(text), hidden_act="gelu"), add_pooling_layer=False)
        except (KeyError, ValueError) as error:
            raise file.unusable(f"it lacks {error}") from None
        file.fill(vision_model, vision, _vision_names)
        file.fill(text_model, {name: text[name] for name in text if not name.endswith("position_ids")})
        self._vision, self._text = (settled(each, self._device) for each in (vision_model, text_model))
        self._head = file.perceptron(head, text_model.config.hidden_size).to(self._device)
        self._tokenizer = load_pretrained("AutoTokenizer", self.tokenizer, self.tokenizer_revision, reward=self.name)
        side = sizes["image_size"]
        square = {"height": side, "width": side}
        self._images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size=square)

    @staticmethod
    def takes(options: Mapping[str, Any]) -> Takes | None:
        """Return the memory of the published model on a device."""
        return transformer_takes("THUDM/ImageReward", "float32")

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image."""
        pixels = self._images(list(media), return_tensors="pt")["pixel_values"]
        values: np.ndarray = self._judged(pixels, prompts).cpu().numpy()
        return Scores((values - np.float32(_MEAN)) / np.float32(_STD))

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Return one score per (3, H, W) image."""
        return (self._judged(processed(media, self._images), prompts) - _MEAN) / _STD

    def _judged(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return (B,) float32 scores of processed images, before standardization."""
        tokens = self._tokenizer(
            as_texts(self._tokenizer, prompts),
            padding="max_length",
            truncation=True,
            max_length=_TOKENS,
            return_tensors="pt",
        ).to(self._device)
        pixels = pixels.to(self._device)
        seen = self._vision(pixel_values=pixels).last_hidden_state
        read = self._text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=self._device),
        ).last_hidden_state
        return self._head(read[:, 0].float()).squeeze(-1)


def _vision_names(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Return a tensor of BLIP's ViT by its name in BlipVisionModel (``convert_blip_original_pytorch_to_hf.py``)."""
    for outer, inner in _VISION_PARTS.items():
        if outer == "norm." and not name.startswith(outer):
            continue
        name = name.replace(outer, inner)
    return {name: tensor}


def _below(stored: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}


def _layers(stored: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max((int(match[1]) for match in (re.match(pattern, name) for name in stored) if match), default=-1)


def _vision_sizes(stored: Mapping[str, Tensor]) -> dict[str, int]:
    patch = stored["patch_embed.proj.weight"]
    side = round((stored["pos_embed"].shape[1] - 1) ** 0.5)
    return {
        "hidden_size": patch.shape[0],
        "intermediate_size": stored["blocks.0.mlp.fc1.weight"].shape[0],
        "num_hidden_layers": _layers(stored, r"blocks\.(\d+)\."),
        "num_attention_heads": patch.shape[0] // _HEAD,
        "patch_size": patch.shape[-1],
        "image_size": side * patch.shape[-1],
    }


def _text_sizes(stored: Mapping[str, Tensor]) -> dict[str, Any]:
    words = stored["embeddings.word_embeddings.weight"]
    return {
        "vocab_size": words.shape[0],
        "hidden_size": words.shape[1],
        "encoder_hidden_size": stored["encoder.layer.0.crossattention.self.key.weight"].shape[1],
        "intermediate_size": stored["encoder.layer.0.intermediate.dense.weight"].shape[0],
        "num_hidden_layers": _layers(stored, r"encoder\.layer\.(\d+)\."),
        "num_attention_heads": words.shape[1] // _HEAD,
        "max_position_embeddings": stored["embeddings.position_embeddings.weight"].shape[0],
        "layer_norm_eps": 1e-12,
    }
