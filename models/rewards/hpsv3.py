"""HPSv3 (arXiv 2508.03789): a Qwen2-VL with a head that tells how much people like an image for a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import nn

from configs.errors import ConfigError
from models.devices import chosen_device, local_rank
from models.rewards.base import Needs, Scores
from models.rewards.pretrained import load_pretrained
from models.rewards.sizes import Takes, encoder_of
from models.rewards.weights import WeightsFile

if TYPE_CHECKING:
    from torch import Tensor

_PROMPT, _REWARD, _IMAGE = "{text_prompt}", "<|Reward|>", "<|image_pad|>"
#: Side of what becomes one token, and how many tokens an image has, about: it is scaled to that.
_TOKEN, _TOKENS = 28, 256
#: Names of the published file's layers and of transformers' since version 4.52.
_PREFIXES = (("visual.", "visual."), ("model.", "language_model."))


@dataclass(kw_only=True)
class HpsV3:
    """The mean that HPSv3's head gives at its reward token (``inference.py``: the first of two numbers, mu and sigma).

    Its language model counts positions in one dimension, as its own forward does.
    """

    name: ClassVar[str] = "hpsv3"
    needs: ClassVar[Needs] = Needs(accelerated=True, batch_size=8)

    weights: str
    """``HPSv3.safetensors`` (MizzenAI/HPSv3)."""
    instruction: str
    """Text file with what it was trained to be asked, with {text_prompt} for the prompt and its reward token."""
    model: str = "Qwen/Qwen2-VL-7B-Instruct"
    """Folder or hub id of the model it was trained from, for its sizes, tokenizer and image processor."""
    revision: str | None = None
    """Commit, tag or branch of that model."""
    device: str = "auto"
    """Torch device, or auto."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights but the head's, which are float32."""
    _vlm: Any = field(init=False, repr=False)
    _head: nn.Sequential = field(init=False, repr=False)
    _tokenizer: Any = field(init=False, repr=False)
    _images: Any = field(init=False, repr=False)
    _asked: str = field(init=False, repr=False)
    _device: torch.device = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Load model and head.

        Raises:
            ConfigError: one cannot be loaded, or the instruction is none.
        """
        from accelerate import init_empty_weights  # type: ignore[import-untyped]
        from transformers import Qwen2VLModel

        self._device = chosen_device(self.device, local_rank(), what="device of reward 'hpsv3'")
        self._asked = _read_instruction(Path(self.instruction))
        config = load_pretrained("AutoConfig", self.model, self.revision, reward=self.name)
        self._tokenizer = load_pretrained("AutoTokenizer", self.model, self.revision, reward=self.name)
        self._tokenizer.add_special_tokens({"additional_special_tokens": [_REWARD]})
        self._tokenizer.padding_side = "right"
        self._images = load_pretrained("AutoImageProcessor", self.model, self.revision, reward=self.name)
        given = WeightsFile(reward=self.name, file=self.weights)
        stored = given.read()
        head = {name.removeprefix("rm_head."): stored.pop(name) for name in list(stored) if name.startswith("rm_head.")}
        stored.pop("lm_head.weight", None)
        words = stored.get("model.embed_tokens.weight")
        if words is not None:
            # The published file has a row more: the reward token's.
            config.text_config.vocab_size = words.shape[0]
        with init_empty_weights(include_buffers=False):
            vlm = Qwen2VLModel(config)
        given.fill(vlm, stored, _renamed, assign=True)
        self._head = _make_head(config.text_config.hidden_size)
        given.fill(self._head, head, lambda name, tensor: {name: tensor.float()})
        self._vlm = vlm.to(self._device, getattr(torch, self.dtype)).eval().requires_grad_(False)
        self._head.to(self._device).eval().requires_grad_(False)

    @classmethod
    def takes(cls, options: Mapping[str, Any]) -> Takes | None:
        """Return what the model takes of a device, its head aside; None where it is not known yet."""
        known = encoder_of(str(options.get("model", cls.model)))
        return None if known is None else known.takes(str(options.get("dtype", cls.dtype)))

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Return one score per (H, W, 3) uint8 image."""
        seen = self._images([_scaled(image) for image in media], return_tensors="pt").to(self._device)
        merged = self._images.merge_size**2
        texts = [
            self._text(prompt, int(grid.prod()) // merged)
            for prompt, grid in zip(prompts, seen["image_grid_thw"], strict=True)
        ]
        tokens = self._tokenizer(texts, padding=True, return_tensors="pt").to(self._device)
        ids = tokens["input_ids"]
        embedded = self._vlm.language_model.embed_tokens(ids)
        found = self._vlm.get_image_features(seen["pixel_values"], seen["image_grid_thw"]).pooler_output
        of_image = (ids == self._tokenizer.convert_tokens_to_ids(_IMAGE))[..., None].expand_as(embedded)
        embedded = embedded.masked_scatter(of_image, torch.cat(list(found)).to(embedded.dtype))
        hidden = self._vlm.language_model(
            inputs_embeds=embedded, attention_mask=tokens["attention_mask"], use_cache=False
        ).last_hidden_state
        at_reward = hidden[ids == self._tokenizer.convert_tokens_to_ids(_REWARD)]
        if len(at_reward) != len(prompts):
            raise ValueError(f"a prompt holds {_REWARD}, which marks the place where the score is read; remove it")
        values: np.ndarray = self._head(at_reward.float())[:, 0].cpu().numpy()
        return Scores(values)

    def _text(self, prompt: str, image_tokens: int) -> str:
        """Return what is asked about an image of so many tokens, as the model's own chat template has it."""
        said = self._asked.replace(_PROMPT, prompt)
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": said}]}
        chat: str = self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return chat.replace(_IMAGE, _IMAGE * image_tokens, 1)


def _make_head(width: int) -> nn.Sequential:
    """Return the published head (``qwen2vl_trainer.py``, 'ranknet'): mu and sigma of a hidden state."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def _renamed(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    for old, new in _PREFIXES:
        if name.startswith(old):
            return {new + name.removeprefix(old): tensor}
    return {name: tensor}


def _scaled(image: np.ndarray) -> Image.Image:
    """Return an image of about 256 tokens, both sides multiples of a token's."""
    height, width = token_grid(*image.shape[:2])
    return Image.fromarray(image).resize((width * _TOKEN, height * _TOKEN), Image.Resampling.BICUBIC)


def token_grid(height: int, width: int) -> tuple[int, int]:
    """Return rows and columns of tokens of an image of (height, width) pixels.

    Qwen's ``smart_resize`` with the same lower and upper bound: sides are rounded, and where that gives too many tokens
    scaled down and cut off, where too few scaled up and filled up.
    """
    rows, columns = max(1, round(height / _TOKEN)), max(1, round(width / _TOKEN))
    if rows * columns == _TOKENS:
        return rows, columns
    factor = math.sqrt(_TOKENS * _TOKEN * _TOKEN / (height * width)) / _TOKEN
    if rows * columns > _TOKENS:
        return max(1, math.floor(height * factor)), max(1, math.floor(width * factor))
    return math.ceil(height * factor), math.ceil(width * factor)


def _read_instruction(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward 'hpsv3': option 'instruction': '{file}' cannot be read: {error}.") from None
    for part in (_PROMPT, _REWARD):
        if text.count(part) != 1:
            raise ConfigError(
                f"reward 'hpsv3': option 'instruction': '{file}' must hold {part} once. It is the text HPSv3 was "
                "trained with; docs/rewards.md says how to write it from its package."
            )
    return text
