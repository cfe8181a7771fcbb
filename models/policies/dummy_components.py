"""Stand-ins for components that a pipeline's class demands and a model does not have, or this machine cannot load.

``DiffusionPipeline.from_pretrained`` refuses a folder whose required component is null, unless it is told so by name;
a component that is there and says nothing needs no telling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, normalizers

from models.weights.pretrained_loading import load_pretrained


def silent_t5(width: int) -> tuple[Any, Any]:
    """Return a T5 encoder of ``width`` parameters twice, and its tokenizer, that give zeros for every text.

    StableDiffusion3Pipeline without a T5 pads text by ``max_sequence_length`` rows of zeros
    (``_get_t5_prompt_embeds``); this one gives the same rows: it has one token, no layer, and weights 0.
    """
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
    # Text that is gone cannot be longer than max_sequence_length: the pipeline would warn of it at every call.
    raw.normalizer = normalizers.Replace(Regex(r"[\s\S]+"), "")
    return encoder, transformers.TokenizersBackend(tokenizer_object=raw, pad_token="<pad>", model_max_length=512)


#: Where an image goes in a text.
_PAD = "<|image_pad|>"


class TextImageProcessor(transformers.ProcessorMixin):
    """Qwen's processor for text and images, from the same files."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        """Join an image processor and a tokenizer; the base class would want the video half too."""
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> TextImageProcessor:
        """Load both from a processor's folder."""
        images = load_pretrained(transformers.Qwen2VLImageProcessorPil, folder, label="model.path")
        return cls(images, load_pretrained(transformers.AutoTokenizer, folder, label="model.path"))

    def __call__(self, *, text: Sequence[str], images: Any, padding: bool, return_tensors: str) -> Any:
        """Return tokens, with as many image tokens as each image has patches, and the patches.

        The images are those of all texts, in order of their places in these.
        """
        pictures = self.image_processor(images=images, return_tensors=return_tensors)
        counts = iter((pictures["image_grid_thw"].prod(1) // self.image_processor.merge_size**2).tolist())
        full = [re.sub(re.escape(_PAD), lambda _: _PAD * next(counts), prompt) for prompt in text]
        tokens = self.tokenizer(full, padding=padding, return_tensors=return_tensors)
        return transformers.BatchFeature({**tokens, **pictures})


class TextProcessor(transformers.ProcessorMixin):
    """Qwen's processor for texts alone, from the same files: its other halves, unused, want torchvision."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a tokenizer with a chat template; None where nothing is read."""
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> TextProcessor:
        """Load it from a processor's folder."""
        return cls(load_pretrained(transformers.AutoTokenizer, folder, label="model.path"))

    def save_pretrained(self, folder: Path, **options: Any) -> None:
        """Write the tokenizer's files."""
        self.tokenizer.save_pretrained(folder)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return the tokens of one conversation as those of a batch, or its text; see the tokenizer's method."""
        written = self.tokenizer.apply_chat_template(conversation, **options)
        return [written] if options.get("tokenize") else written

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return tokens of texts, as the tokenizer does."""
        return self.tokenizer(text, **options)


class Unread(TextProcessor):
    """One that pipelines may ask for tokens of their template where no prompt is read; it has none."""

    def __init__(self) -> None:
        """Hold nothing."""
        super().__init__(self)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return no tokens."""
        return [[]]

    def encode(self, text: str) -> list[int]:
        """Return the number of a token that no text has."""
        return [-1]
