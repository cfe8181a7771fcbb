"""Reward models published as pickles of other libraries, read from a safetensors copy that keeps their names.

Convert one where you trust it: ``safetensors.torch.save_file(torch.load(FILE, weights_only=True), "copy.safetensors")``
(of HPSv2 and v2.1, ``torch.load(...)["state_dict"]``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from models.devices import chosen_device, local_rank
from models.rewards.base import Needs, Scores
from models.rewards.clip import perceptron
from models.rewards.pretrained import load_pretrained

#: Of ImageReward's scores over its own data (``ImageReward.py``).
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072
#: Most text tokens ImageReward was trained with.
_TOKENS = 35
#: Width of an attention head of BLIP's encoders, of images and of text.
_HEAD = 64

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
class Hps:
    """Human Preference Score v2 and v2.1 (arXiv 2306.09341): cosine of image and prompt, by a CLIP ViT-H/14 of raters.

    The cosine as DanceGRPO and DiffusionNFT have it; ``percent``: times 100, as papers tell it.
    """

    name: ClassVar[str] = "hpsv2"
    needs: ClassVar[Needs] = Needs(accelerated=True, batch_size=16)

    weights: str
    """Safetensors copy of ``HPS_v2.1_compressed.pt`` or ``HPS_v2_compressed.pt`` (xswu/HPSv2)."""
    clip: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Folder or hub id of the CLIP model it was trained from, for its sizes and its processor."""
    revision: str | None = None
    """Commit, tag or branch of the CLIP model."""
    convention: Literal["cosine", "percent"] = "cosine"
    device: str = "auto"
    """Torch device, or auto."""
    _clip: Any = field(init=False, repr=False)
    _processor: Any = field(init=False, repr=False)
    _device: torch.device = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Load the model.

        Raises:
            ConfigError: it cannot be loaded.
        """
        from transformers import CLIPModel

        self._device = chosen_device(self.device, local_rank(), what="device of reward 'hpsv2'")
        config = load_pretrained("CLIPConfig", self.clip, self.revision, reward=self.name)
        self._processor = load_pretrained("CLIPProcessor", self.clip, self.revision, reward=self.name)
        model = CLIPModel(config)
        fill(model, read_weights(self.weights, self.name), clip_names, where=self.weights, reward=self.name)
        self._clip = model.to(self._device).eval().requires_grad_(False)

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Return one score per (H, W, 3) uint8 image."""
        most = self._clip.config.text_config.max_position_embeddings
        tokens = self._processor.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=most, return_tensors="pt"
        ).to(self._device)
        pixels = self._processor.image_processor(list(media), return_tensors="pt")["pixel_values"].to(self._device)
        found = self._clip(pixel_values=pixels, **tokens)
        cosines = (found.image_embeds * found.text_embeds).sum(-1)
        values: np.ndarray = cosines.cpu().numpy()
        return Scores(values * np.float32(100) if self.convention == "percent" else values)


@dataclass(kw_only=True)
class ImageReward:
    """ImageReward v1.0 (arXiv 2304.05977): raters' preference, standardized; BLIP's text encoder looks at the image."""

    name: ClassVar[str] = "imagereward"
    needs: ClassVar[Needs] = Needs(accelerated=True, batch_size=16)

    weights: str
    """Safetensors copy of ``ImageReward.pt`` (THUDM/ImageReward)."""
    tokenizer: str = "google-bert/bert-base-uncased"
    """Folder or hub id of the tokenizer."""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of the tokenizer."""
    device: str = "auto"
    """Torch device, or auto."""
    _vision: Any = field(init=False, repr=False)
    _text: Any = field(init=False, repr=False)
    _head: nn.Sequential = field(init=False, repr=False)
    _tokenizer: Any = field(init=False, repr=False)
    _images: Any = field(init=False, repr=False)
    _device: torch.device = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Load both encoders and the perceptron on them.

        Raises:
            ConfigError: one cannot be loaded.
        """
        from transformers import BlipTextConfig, BlipVisionConfig, CLIPImageProcessor
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        self._device = chosen_device(self.device, local_rank(), what="device of reward 'imagereward'")
        stored = read_weights(self.weights, self.name)
        vision, text, head = (_below(stored, part) for part in ("blip.visual_encoder.", "blip.text_encoder.", "mlp."))
        try:
            sizes = _vision_sizes(vision)
            made = BlipVisionModel(BlipVisionConfig(**sizes, layer_norm_eps=1e-6, hidden_act="gelu"))
            asking = BlipTextModel(BlipTextConfig(**_text_sizes(text), hidden_act="gelu"), add_pooling_layer=False)
        except (KeyError, ValueError) as error:
            raise ConfigError(_not_these(self.weights, self.name, f"it lacks {error}")) from None
        fill(made, vision, vision_names, where=self.weights, reward=self.name)
        fill(asking, text, _but_positions, where=self.weights, reward=self.name)
        self._vision, self._text = (each.to(self._device).eval().requires_grad_(False) for each in (made, asking))
        self._head = perceptron(head, sizes_of=self.weights, width=asking.config.hidden_size).to(self._device)
        self._tokenizer = load_pretrained("AutoTokenizer", self.tokenizer, self.tokenizer_revision, reward=self.name)
        side = sizes["image_size"]
        square = {"height": side, "width": side}
        self._images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size=square)

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Return one score per (H, W, 3) uint8 image."""
        tokens = self._tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt"
        ).to(self._device)
        pixels = self._images(list(media), return_tensors="pt")["pixel_values"].to(self._device)
        seen = self._vision(pixel_values=pixels).last_hidden_state
        read = self._text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=self._device),
        ).last_hidden_state
        values: np.ndarray = self._head(read[:, 0].float()).squeeze(-1).cpu().numpy()
        return Scores((values - np.float32(_MEAN)) / np.float32(_STD))


Names = Callable[[str, Tensor], Mapping[str, Tensor]]


def clip_names(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Return what a tensor of open_clip's is in CLIPModel (``convert_clip_original_pytorch_to_hf.py``)."""
    if name == "logit_scale":
        return {name: tensor}
    if name in ("visual.proj", "text_projection"):
        return {("visual" if name == "visual.proj" else "text") + "_projection.weight": tensor.T}
    for pattern, inner in _CLIP_NAMES:
        found = re.match(pattern, name)
        if found:
            name = inner + name[found.end() :]
            break
    for outer, inner in _CLIP_PARTS.items():
        name = name.replace(outer, inner)
    fused = re.fullmatch(r"(.*)\.attn\.in_proj_(weight|bias)", name)
    if fused is None:
        return {name: tensor}
    parts = zip("qkv", tensor.chunk(3), strict=True)
    return {f"{fused[1]}.self_attn.{letter}_proj.{fused[2]}": part for letter, part in parts}


def _but_positions(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    return {} if name.endswith("position_ids") else {name: tensor}


def vision_names(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Return what a tensor of BLIP's ViT is in BlipVisionModel (``convert_blip_original_pytorch_to_hf.py``)."""
    for outer, inner in _VISION_PARTS.items():
        if outer == "norm." and not name.startswith(outer):
            continue
        name = name.replace(outer, inner)
    return {name: tensor}


def read_weights(file: str, reward: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        ConfigError: it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored: dict[str, Tensor] = load_file(Path(file))
    except (OSError, SafetensorError) as error:
        raise ConfigError(_not_these(file, reward, str(error).splitlines()[0])) from None
    return stored


def fill(
    model: nn.Module, stored: Mapping[str, Tensor], names: Names, *, where: str, reward: str, assign: bool = False
) -> None:
    """Give a model all its parameters.

    Args:
        model: the model; of one without weights, with ``assign``, they become the stored ones.
        stored: tensors by their published names.
        names: what each is in the model.
        where: the file they are of.
        reward: who asks, for messages.
        assign: take the stored tensors instead of copying them.

    Raises:
        ConfigError: one is missing, left over or of another shape.
    """
    named = {key: value for name, tensor in stored.items() for key, value in names(name, tensor).items()}
    try:
        missing, unexpected = model.load_state_dict(named, strict=False, assign=assign)
    except RuntimeError as error:
        raise ConfigError(_not_these(where, reward, str(error).splitlines()[1].strip())) from None
    wrong = [*(name for name in missing if not name.endswith("position_ids")), *unexpected]
    if wrong:
        raise ConfigError(_not_these(where, reward, f"{len(wrong)} tensors do not fit the model, {wrong[0]} first"))


def _not_these(file: str, reward: str, why: str) -> str:
    return (
        f"reward '{reward}': option 'weights': '{file}' cannot be used: {why}. It must be a safetensors copy of the "
        "published file with its names kept; docs/rewards.md says how to make one."
    )


def _below(stored: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}


def _layers(stored: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max((int(found[1]) for found in (re.match(pattern, name) for name in stored) if found), default=-1)


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
