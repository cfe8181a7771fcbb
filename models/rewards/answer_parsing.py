"""Qwen2-VL reward models: a head reads the hidden states at special reward tokens of a text on an image or clip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from jinja2 import TemplateError
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.models.rewards.device_placement import settled
from flowmill.models.rewards.pretrained import load_pretrained
from flowmill.models.rewards.weight_files import WeightsFile
from flowmill.models.text.chat_templates import render_chat
from flowmill.models.text.control_tokens import as_text

PROMPT = "{text_prompt}"
#: Side in pixels of the square that becomes one token.
TOKEN = 28
#: Names of the published files' layers and of transformers' since version 4.52.
_PREFIXES = (("visual.", "visual."), ("model.", "language_model."))
_PADS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


class Backbone(nn.Module):
    """The model without its language head, and its tokenizer; a module, so that it can be offloaded while idle. Its
    language model counts positions in one dimension, as in the forward passes of HPSv3 and VideoAlign, which pass no
    positions."""

    def __init__(
        self,
        file: WeightsFile,
        stored: dict[str, Tensor],
        *,
        model: str,
        revision: str | None,
        marks: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Load both.

        Args:
            stored: its tensors by their published names, without those of the head.
            model: folder or hub id of the base model, for its sizes and tokenizer.
            marks: the reward tokens, in the order they were added to the vocabulary.
        """
        from accelerate import init_empty_weights  # type: ignore[import-untyped]
        from transformers import Qwen2VLModel

        super().__init__()
        self._reward = file.reward
        config = load_pretrained("AutoConfig", model, revision, reward=file.reward)
        self.tokenizer = load_pretrained("AutoTokenizer", model, revision, reward=file.reward)
        self.tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
        self.tokenizer.padding_side = "right"
        stored.pop("lm_head.weight", None)
        words = stored.get("model.embed_tokens.weight")
        if words is not None:
            # A published file has additional rows for its reward tokens.
            config.text_config.vocab_size = words.shape[0]
        with init_empty_weights(include_buffers=False):
            vlm = Qwen2VLModel(config)
        file.fill(vlm, stored, _renamed, assign=True)
        self.width = int(config.text_config.hidden_size)
        self._marks, self._device = list(marks), device
        self._vlm = settled(vlm, device, dtype)

    def text(self, template: str, prompt: str, kind: Literal["image", "video"], tokens: int) -> str:
        """Return the question on an image or clip of ``tokens`` tokens, rendered by the model's chat template."""
        question = template.replace(PROMPT, as_text(self.tokenizer, prompt))
        content = [{"type": kind}, {"type": "text", "text": question}]
        try:
            # Both models are published with the same chat template, which has no date.
            chat = render_chat(
                self.tokenizer,
                [{"role": "user", "content": content}],
                setting="another 'model', or its template",
                generate=True,
            )
        except TemplateError as error:
            raise ConfigError(f"reward '{self._reward}': the model's chat template fails: {error}.") from None
        return chat.replace(_PADS[kind], _PADS[kind] * tokens, 1)

    def verdicts(
        self, texts: Sequence[str], pixels: Tensor, grid: Tensor, kind: Literal["image", "video"]
    ) -> list[Tensor]:
        """Return the last hidden states at each reward token, a (B, W) float32 tensor per token; raise ValueError if a
        text does not contain each of the tokens once. ``pixels``: (patches of all B, values of one), as the vision
        model expects them; ``grid``: (B, 3) int64 patches in time, height and width."""
        tokens = self.tokenizer(list(texts), padding=True, return_tensors="pt").to(self._device)
        ids = tokens["input_ids"]
        embedded = self._vlm.language_model.embed_tokens(ids)
        look = self._vlm.get_image_features if kind == "image" else self._vlm.get_video_features
        features = look(pixels.to(self._device), grid.to(self._device)).pooler_output
        seen = (ids == self.tokenizer.convert_tokens_to_ids(_PADS[kind]))[..., None].expand_as(embedded)
        embedded = embedded.masked_scatter(seen, torch.cat(list(features)).to(embedded.dtype))
        hidden = self._vlm.language_model(
            inputs_embeds=embedded, attention_mask=tokens["attention_mask"], use_cache=False
        ).last_hidden_state
        at = [hidden[ids == self.tokenizer.convert_tokens_to_ids(mark)] for mark in self._marks]
        for mark, states in zip(self._marks, at, strict=True):
            if len(states) != len(texts):
                raise ValueError(f"the model's chat template does not write {mark} once, where the score is read")
        return [states.float() for states in at]


def token_grid(height: int, width: int, *, least: int, most: int) -> tuple[int, int]:
    """Return rows and columns of tokens of an image of (height, width) pixels, with ``least`` to ``most`` pixels. This
    is Qwen's ``smart_resize`` in the same order of operations, as rounding matters for sides that just fit. Sides are
    rounded to tokens; with too many pixels they are scaled down and floored, with too few scaled up and ceiled."""
    rows, columns = max(1, round(height / TOKEN)), max(1, round(width / TOKEN))
    if rows * columns * TOKEN**2 > most:
        beta = math.sqrt(height * width / most)
        return max(1, math.floor(height / beta / TOKEN)), max(1, math.floor(width / beta / TOKEN))
    if rows * columns * TOKEN**2 < least:
        beta = math.sqrt(least / (height * width))
        return math.ceil(height * beta / TOKEN), math.ceil(width * beta / TOKEN)
    return rows, columns


def read_instruction(reward: str, file: Path, marks: Sequence[str]) -> str:
    """Return the instruction that a model was trained with; raise ConfigError if it cannot be read, or lacks the
    prompt's placeholder or a reward token."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward '{reward}': option 'instruction': '{file}' cannot be read: {error}.") from None
    for part in (PROMPT, *marks):
        if text.count(part) != 1:
            raise ConfigError(
                f"reward '{reward}': option 'instruction': '{file}' must hold {part} once. It is the text the "
                "model was trained with; docs/rewards.md says how to write it from its package."
            )
    return text


def _renamed(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    for old, new in _PREFIXES:
        if name.startswith(old):
            return {new + name.removeprefix(old): tensor}
    return {name: tensor}
