"""Stand-ins for components that a pipeline's class requires and that a model lacks or this machine cannot load.

``DiffusionPipeline.from_pretrained`` refuses a folder whose required component is null unless it is passed as None.
A stand-in that returns zeros or no tokens makes that argument unnecessary.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, normalizers

from flowmill.models.weights.pretrained_loading import load_pretrained


def silent_t5(width: int) -> tuple[Any, Any]:
    """Return a T5 encoder with 2 * ``width`` parameters, and its tokenizer, that return zeros for every text. Without a
    T5, StableDiffusion3Pipeline pads text with ``max_sequence_length`` rows of zeros (``_get_t5_prompt_embeds``). This
    encoder returns the same rows: it has one token, no layers, and zero weights."""
    config = transformers.T5Config(
        vocab_size=1,
        d_model=width,
        d_kv=1,
        d_ff=1,
        num_layers=0,
        num_heads=1,
        pad_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        encoder = transformers.T5EncoderModel(config).eval()
    for parameter in encoder.parameters():
        torch.nn.init.zeros_(parameter)
    raw = Tokenizer(models.WordLevel(vocab={"<pad>": 0}, unk_token="<pad>"))
    # Removing the text keeps it below max_sequence_length: the pipeline would warn at every call.
    raw.normalizer = normalizers.Replace(Regex(r"[\s\S]+"), "")
    return encoder, transformers.TokenizersBackend(tokenizer_object=raw, pad_token="<pad>", model_max_length=512)


class TextProcessor(transformers.ProcessorMixin):
    """Qwen's processor for text only, loaded from the same files: its image and video processors need torchvision."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a tokenizer with a chat template, or None if no text is read."""
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> TextProcessor:
        """Load it from a processor's folder."""
        return cls(load_pretrained(transformers.AutoTokenizer, folder, label="model.path"))

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        """Write the tokenizer's files."""
        self.tokenizer.save_pretrained(folder)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return a conversation's tokens, as a batch of one, or its text; see the tokenizer's method."""
        written = self.tokenizer.apply_chat_template(conversation, **options)
        return [written] if options.get("tokenize") else written

    def __call__(self, text: Any, **options: Any) -> Any:
        return self.tokenizer(text, **options)


#: Placeholder of an image in a text.
_PAD = "<|image_pad|>"


class TextImageProcessor(TextProcessor):
    """Qwen's processor for text and images, loaded from the same files."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        """Combine an image processor and a tokenizer; the base class would also require a video processor."""
        super().__init__(tokenizer)
        self.image_processor = image_processor

    @classmethod
    def load(cls, folder: Path) -> TextImageProcessor:
        images = load_pretrained(transformers.Qwen2VLImageProcessorPil, folder, label="model.path")
        return cls(images, load_pretrained(transformers.AutoTokenizer, folder, label="model.path"))

    def __call__(self, text: Any, *, images: Any = None, **options: Any) -> Any:
        """Return the tokens of texts, with one image token per image patch, which ``mm_token_type_ids`` mark, and the
        patches. ``images`` lists the images of all texts, in the order of their placeholders."""
        if images is None:
            return super().__call__(text, **options)
        pictures = self.image_processor(images=images, return_tensors=options["return_tensors"])
        counts = iter((pictures["image_grid_thw"].prod(1) // self.image_processor.merge_size**2).tolist())
        full = [re.sub(re.escape(_PAD), lambda _: _PAD * next(counts), prompt) for prompt in text]
        tokens = self.tokenizer(full, **options)
        marks = torch.tensor(self.create_mm_token_type_ids(tokens["input_ids"].tolist()))
        return transformers.BatchFeature({**tokens, **pictures, "mm_token_type_ids": marks})

    def create_mm_token_type_ids(self, input_ids: list[list[int]]) -> list[list[int]]:
        """Return 1 for each token of an image, and 0 for others."""
        image = self.tokenizer.convert_tokens_to_ids(_PAD)
        return [[int(token == image) for token in tokens] for tokens in input_ids]


class Unread(TextProcessor):
    """A processor without tokens, for pipelines that tokenize their template although no prompt is encoded."""

    def __init__(self) -> None:
        super().__init__(self)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        return [[]]

    def encode(self, text: str) -> list[int]:
        """Return a token id that no text has."""
        return [-1]
