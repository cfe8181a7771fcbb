"""HPSv3 (arXiv 2508.03789): a Qwen2-VL with a head that predicts human preference of an image for a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import nn

from configs.path_types import FilePlace, ModelPlace
from models.devices import chosen_device, local_rank
from models.rewards.answer_parsing import TOKEN, Backbone, read_instruction, token_grid
from models.rewards.base import Needs, Scores
from models.rewards.pretrained import load_pretrained
from models.rewards.sizes import Takes, transformer_takes
from models.rewards.weight_files import WeightsFile

_REWARD = "<|Reward|>"
#: Target number of pixels of a scaled image: 256 tokens.
_PIXELS = 256 * TOKEN**2


@dataclass(kw_only=True)
class HpsV3:
    """The mean that HPSv3's head gives at its reward token (``inference.py``: the first of mu and sigma)."""

    name: ClassVar[str] = "hpsv3"
    needs: ClassVar[Needs] = Needs(media="images", accelerated=True, batch_size=8, spreads=True)

    weights: FilePlace
    """``HPSv3.safetensors`` (MizzenAI/HPSv3)."""
    instruction: FilePlace
    """Text file with the instruction of its training, with {text_prompt} for the prompt and its reward token."""
    model: ModelPlace = "Qwen/Qwen2-VL-7B-Instruct"
    """Folder or hub id of its base model, for its sizes, tokenizer and image processor."""
    revision: str | None = None
    """Commit, tag or branch of that model."""
    device: str = "auto"
    """Torch device, or auto."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights, except for those of the head, which are float32."""
    _reader: Backbone = field(init=False, repr=False)
    _head: nn.Sequential = field(init=False, repr=False)
    _images: Any = field(init=False, repr=False)
    _instruction: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Load model and head.

        Raises:
            ConfigError: one cannot be loaded, or the instruction is invalid.
        """
        device = chosen_device(self.device, local_rank(), label="device of reward 'hpsv3'")
        self._instruction = read_instruction(self.name, Path(self.instruction), [_REWARD])
        self._images = load_pretrained("AutoImageProcessor", self.model, self.revision, reward=self.name)
        given = WeightsFile(reward=self.name, file=self.weights)
        stored = given.read()
        head = {name.removeprefix("rm_head."): stored.pop(name) for name in list(stored) if name.startswith("rm_head.")}
        dtype: torch.dtype = getattr(torch, self.dtype)
        self._reader = Backbone(
            given, stored, model=self.model, revision=self.revision, marks=[_REWARD], device=device, dtype=dtype
        )
        self._head = _make_head(self._reader.width)
        given.fill(self._head, head, lambda name, tensor: {name: tensor.float()})
        self._head.to(device).eval().requires_grad_(False)

    @classmethod
    def takes(cls, options: Mapping[str, Any]) -> Takes | None:
        """Return the memory the model needs on a device, without its head; None if it is not known yet."""
        return transformer_takes(str(options.get("model", cls.model)), str(options.get("dtype", cls.dtype)))

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Return one score per (H, W, 3) uint8 image."""
        seen = self._images([_scaled(image) for image in media], return_tensors="pt")
        grid, merged = seen["image_grid_thw"], self._images.merge_size**2
        texts = [
            self._reader.text(self._instruction, prompt, "image", int(size.prod()) // merged)
            for prompt, size in zip(prompts, grid, strict=True)
        ]
        (at_reward,) = self._reader.verdicts(texts, seen["pixel_values"], grid, "image")
        values: np.ndarray = self._head(at_reward)[:, 0].cpu().numpy()
        return Scores(values)


def _make_head(width: int) -> nn.Sequential:
    """Return the published head (``qwen2vl_trainer.py``, 'ranknet'): mu and sigma of a hidden state."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def _scaled(image: np.ndarray) -> Image.Image:
    """Return an image scaled to about 256 tokens, with both sides multiples of a token's side."""
    height, width = token_grid(*image.shape[:2], least=_PIXELS, most=_PIXELS)
    return Image.fromarray(image).resize((width * TOKEN, height * TOKEN), Image.Resampling.BICUBIC)
