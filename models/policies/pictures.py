"""Images of prompts as a processor of transformers reads them, numbered within a process.

In rows of token ids, a token of image n has the id -n: the same text with another image is another row, so rows are
compared, grouped, padded and passed on like rows of text. Only the policy replaces these ids, by the model's token for
images. Stored rows have the model's token.

Images are read one by one, and by Pillow: the inputs of an image depend neither on the other images of a
prompt nor on the packages of a machine. Legend: N tokens of an image.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from flowmill.configs.errors import ConfigError
from flowmill.models.policies.language_model_folders import load_language_config, load_tokenizer
from flowmill.models.policies.sized_cache import SizedCache
from flowmill.models.weights.pretrained_loading import load_pretrained

if TYPE_CHECKING:
    from torch import Tensor

#: Images whose pixel inputs stay in host memory, and prompts whose positions do.
_CACHED_IMAGES, _CACHED_PLACES = 64, 1024
#: Bytes of features of images that stay on the device while their encoder is frozen.
CACHED_BYTES = 1 << 28
#: Attributes of processors and tokenizers with the marks of images, clips and sounds in texts.
_MARKS = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "fake_image_token")

#: Files of a processor besides the tokenizer's.
_FILES = (
    *(f"{name}_config.json" for name in ("preprocessor", "processor", "video_preprocessor")),
    *("chat_template.json", "chat_template.jinja"),
)
_LABEL = "model.path: the processor of"
_REMEDY = "Save the processor next to the model with processor.save_pretrained()."

Inputs = Mapping[str, "Tensor"]
#: Returns the (H, W, 3) uint8 pixels of an image.
Read = Callable[[], np.ndarray]


class Picture(NamedTuple):
    """An image in texts."""

    text: str
    """The expansion of its mark in a text."""
    tokens: int
    """N."""


class Pictures:
    """The numbered images of one model's processor."""

    def __init__(self, processor: Any, token: int, files: Sequence[Path]) -> None:
        """Bind to a processor. ``token``: id of the model's token that features of images replace; ``files``: files of
        the processor besides the tokenizer's."""
        self.processor, self.token, self.files = processor, token, files
        self._numbers: dict[str, int] = {}
        self._reads: list[Read] = []
        self._pictures: dict[int, Picture] = {}
        self._inputs, self._lock = SizedCache(_CACHED_IMAGES), threading.RLock()
        self.places = SizedCache(_CACHED_PLACES)
        """Positions of rows up to their last image."""

    @property
    def marks(self) -> frozenset[str]:
        """Texts that stand for images or other media in a prompt."""
        sources = (self.processor, self.processor.tokenizer)
        texts = (getattr(source, name, None) for source in sources for name in _MARKS)
        return frozenset(each for each in texts if isinstance(each, str) and each)

    def number(self, key: str, read: Read) -> int:
        """Return the number of an image, 1 or more. ``key``: hash of its content; ``read``: returns its pixels."""
        with self._lock:
            if key not in self._numbers:
                self._reads.append(read)
                self._numbers[key] = len(self._reads)
            return self._numbers[key]

    def picture(self, number: int) -> Picture:
        """Return an image in texts; raise ConfigError if the processor cannot read it."""
        if number not in self._pictures:
            self.inputs(number)
        return self._pictures[number]

    def inputs(self, number: int) -> Inputs:
        """Return the arguments of ``get_image_features`` for an image, on the CPU; raise ConfigError if the processor
        cannot read it."""
        arguments: Inputs = self._inputs.of(number, lambda: self._read(number))
        return arguments

    def expanded(self, text: str, numbers: Sequence[int]) -> str:
        """Return a chat with a mark per image as the processor writes it, with a mark per token. Raises ConfigError if
        the chat has more or fewer marks than images."""
        mark = self.processor.image_token
        if text.count(mark) != len(numbers):
            raise ConfigError(
                f"the processor's chat template writes {text.count(mark)} marks {mark!r} for a prompt with "
                f"{len(numbers)} images. Mend the template, or choose another model."
            )
        texts = iter([self.picture(number).text for number in numbers])
        return re.sub(re.escape(mark), lambda _: next(texts), text)

    def placed(self, ids: Sequence[int], numbers: Sequence[int]) -> list[int]:
        """Return ids whose first image tokens have the ids of images, in order; the rest of the tokens, and image
        tokens after these, stay."""
        own = iter([-number for number in numbers for _ in range(self.picture(number).tokens)])
        return [next(own, token) if token == self.token else int(token) for token in ids]

    def stored(self, ids: Sequence[int]) -> list[int]:
        """Return ids with the model's token for images."""
        return [self.token if token < 0 else token for token in ids]

    def of_row(self, ids: Sequence[int]) -> list[int]:
        """Return the numbers of the images of a row in order, an image as often as it occurs."""
        numbers, negative = [], [-token for token in ids if token < 0]
        place = 0
        while place < len(negative):
            numbers.append(negative[place])
            place += self.picture(negative[place]).tokens
        return numbers

    def _read(self, number: int) -> dict[str, Tensor]:
        processor = self.processor
        image = Image.fromarray(self._reads[number - 1]())
        options = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt")
        try:
            inputs, (text,) = processor._process_images([image], **options["images_kwargs"])
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(
                f"an image of {image.width} x {image.height} pixels cannot be read by the model's processor: {error}. "
                "Give another image."
            ) from None
        ids = processor.tokenizer(text, add_special_tokens=False).input_ids
        self._pictures[number] = Picture(text, list(ids).count(self.token))
        return {name: value for name, value in inputs.items() if hasattr(value, "shape")}


@lru_cache(maxsize=4)
def _pictures(folder: Path, stamp: tuple[int, ...]) -> Pictures:
    return Pictures(load_processor(folder), image_token(load_language_config(folder)), processor_files(folder))


def pictures_of(folder: Path) -> Pictures:
    """Return the images of a model's folder, the same object for all policies and prompts of a process. Raises
    ConfigError, see ``load_processor``."""
    files = sorted(folder.glob("*.json")) + sorted(folder.glob("*.jinja"))
    return _pictures(folder.resolve(), tuple(file.stat().st_mtime_ns for file in files))


def image_token(config: Any) -> int:
    """Return the id of the token that features of images replace."""
    token = getattr(config, "image_token_id", None)
    return int(config.image_token_index if token is None else token)


def processor_files(folder: Path) -> list[Path]:
    """Return the files of a folder's processor besides the tokenizer's."""
    return [folder / name for name in _FILES if (folder / name).is_file()]


def load_image_processor(folder: Path) -> Any:
    """Return a model's processor of images, Pillow's; raise ConfigError if the folder has no readable one."""
    from transformers import AutoImageProcessor

    return load_pretrained(AutoImageProcessor, folder, label=_LABEL, remedy=_REMEDY, backend="pil")


def load_processor(folder: Path) -> Any:
    """Return a model's processor for images and texts: with Pillow's image processor, and without that of videos, which
    needs torchvision. Raises ConfigError if the folder has no readable one, or it has no chat template."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = load_language_config(folder)
    kind: Any = PROCESSOR_MAPPING.get(type(config), None)
    if kind is None or "image_processor" not in kind.get_attributes():
        raise ConfigError(
            f"model.path '{folder}' holds a model of the type '{config.model_type}', of which transformers has no "
            "processor for images. Choose a vision-language model."
        )
    parts = {"tokenizer": load_tokenizer(folder), "image_processor": load_image_processor(folder)}
    attributes = kind.get_attributes()
    loading = {
        "_get_arguments_from_pretrained": classmethod(
            lambda *args, **options: [parts.get(name) for name in attributes]
        ),
        "check_argument_for_proper_class": lambda processor, name, value: type(value),
    }
    patched = type(kind.__name__, (kind,), loading)
    processor = load_pretrained(patched, folder, label=_LABEL, remedy=_REMEDY)
    if not isinstance(processor.chat_template, str):
        processor.chat_template = getattr(parts["tokenizer"], "chat_template", None)
    if not isinstance(processor.chat_template, str | dict):
        raise ConfigError(
            f"model.path '{folder}' has a processor without a chat template, so it is not known how texts and images "
            "are put together. Choose a model that follows instructions, or save the processor with a template."
        )
    return processor


def arguments_of(function: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
    """Return those inputs that a function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in inputs.items() if name in names}
