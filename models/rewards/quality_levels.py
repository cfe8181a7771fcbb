"""Quality of an image by a vision language model: the probabilities of five words as its next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jinja2 import TemplateError
from PIL import Image

from flowmill.configs.errors import ConfigError
from flowmill.configs.path_types import ModelPlace
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores
from flowmill.models.rewards.device_placement import settled
from flowmill.models.rewards.pretrained import Pretrained
from flowmill.models.text.chat_templates import day_of, render_chat

#: The words, with their scores.
LEVELS: Mapping[str, float] = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}


@dataclass(kw_only=True)
class QualityLevels(Pretrained):
    """The mean of 5 (excellent) to 1 (bad), weighted by a softmax over the logits of these five words alone.

    This is the score of Q-Align (arXiv 2312.17090) and DeQA-Score (arXiv 2501.11561, ``src/evaluate/scorer.py``), which
    take the first token of each word. The options default to their question and the beginning of their answer. Prompts
    are ignored.
    """

    name: ClassVar[str] = "quality_levels"
    needs: ClassVar[Needs] = Needs(media="images", accelerated=True, batch_size=8)
    bounds: ClassVar[Bounds] = (1.0, 5.0)

    model: ModelPlace
    """Folder or hub id of a model with a class in transformers itself (``AutoModelForImageTextToText``)."""
    template_date: str | None = None
    """Date passed to a chat template that needs one, as 2024-07-26; without it such a template is refused."""
    question: str = "How would you rate the quality of this image?"
    """Question on every image, rendered by the model's chat template."""
    answer: str = "The quality of the image is"
    """Beginning of its answer; one of the words comes next."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the weights."""

    def __post_init__(self) -> None:
        """Load the model; raise ConfigError if it cannot be loaded without third-party code, or two words have the same
        first token."""
        device = self.chosen()
        self._processor = self.loaded("AutoProcessor")
        self._text = self._rendered()
        self._tokens = self._first_tokens()
        self._vlm = settled(self.loaded("AutoModelForImageTextToText"), device, getattr(torch, self.dtype))

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score, 1 to 5, per (H, W, 3) uint8 image."""
        images = [Image.fromarray(image) for image in media]
        # A template may write the token that the tokenizer adds; ``ProcessorMixin.apply_chat_template`` does the same.
        bos = self._processor.tokenizer.bos_token
        more = {"add_special_tokens": False} if bos is not None and self._text.startswith(bos) else {}
        inputs = self._processor(images=images, text=[self._text] * len(images), return_tensors="pt", **more)
        inputs = inputs.to(self._vlm.device, self._vlm.dtype)
        logits = self._vlm(**inputs).logits[:, -1, self._tokens].float()
        shares = torch.softmax(logits, -1).cpu()
        values: np.ndarray = (shares @ torch.tensor(list(LEVELS.values()))).numpy()
        notes = [", ".join(f"{word} {share:.2f}" for word, share in zip(LEVELS, row, strict=True)) for row in shares]
        return Scores(values, notes)

    def _rendered(self) -> str:
        content = [{"type": "image"}, {"type": "text", "text": self.question}]
        try:
            chat = render_chat(
                self._processor,
                [{"role": "user", "content": content}],
                setting=f"the option 'template_date' of reward '{self.name}'",
                day=day_of(self.template_date, self.name),
                generate=True,
            )
        except (AttributeError, TemplateError) as error:
            raise ConfigError(
                f"reward '{self.name}': '{self.model}' has no chat template to ask in: {error}. Give a model that "
                "answers questions about images."
            ) from None
        return f"{chat}{'' if chat[-1:].isspace() else ' '}{self.answer}"

    def _first_tokens(self) -> list[int]:
        """Return the first token of each word after the answer's beginning."""
        tokenizer = self._processor.tokenizer
        before, *after = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (self.answer, *(f"{self.answer} {word}" for word in LEVELS))
        )
        tokens = [ids[len(before)] for ids in after if ids[: len(before)] == before]
        if len(set(tokens)) < len(LEVELS):
            raise ConfigError(
                f"reward '{self.name}': to the tokenizer of '{self.model}' {', '.join(LEVELS)} do not begin with five "
                "different tokens after the option 'answer'. Give another answer, which ends in a whole word, or "
                "another model."
            )
        return tokens
