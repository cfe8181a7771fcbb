"""Given texts and images of tokens as samples: a prompt as in rollouts, then the tokens that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.errors import ConfigError, DataError
from storage.trajectories.base import Sample
from tasks.inputs.chats import messages_of, shown_text
from tasks.inputs.prompts import image_keys
from tasks.modalities.given import GivenSample
from tasks.modalities.given_images import read_media
from tasks.modalities.samplers import SamplingContext
from tasks.modalities.tokens.given_chats import chat_tokens
from tasks.modalities.tokens.run_prompts import prompts_of
from tasks.modalities.tokens.text import FINISHES


class GivenText(NamedTuple):
    """Token ids of a prompt and a given text, or of a chat."""

    tokens: list[int]
    """All ids."""
    mask: list[int]
    """1 for each token that is trained on."""


class GivenImage(NamedTuple):
    """Token ids of a prompt, and a given image."""

    prompt: list[int]
    """All ids of the prompt."""
    pixels: np.ndarray
    """(H, W, 3) uint8."""


def read_image(making: SamplingContext, sample: GivenSample) -> GivenImage:
    """Return the token ids of a prompt, and its given image.

    Raises:
        DataError: the image cannot be read, or the prompt not tokenized within the limits of ``rollout.tokens``.
    """
    pixels, prompts = read_media(making, sample, sample.file.read()), prompts_of(making.context)
    try:
        return GivenImage(list(prompts.stored(prompts.fitting(sample.prompt.text))), pixels)
    except ConfigError as error:
        raise DataError(f"{sample.file.name}: {error}") from None


def read_text(making: SamplingContext, sample: GivenSample) -> GivenText:
    """Return the token ids of a prompt and its given text, which ends with the tokenizer's end token; or of a chat.

    Raises:
        DataError: it is a file, or cannot be tokenized within the limits of ``rollout.tokens``.
    """
    if sample.file.text is None:
        raise DataError(
            f"{sample.file.name} is a file, but the policy writes texts. Set data.sample to a column of texts."
        )
    prompts = prompts_of(making.context)
    try:
        if sample.file.is_chat:
            return GivenText(*chat_tokens(prompts, messages_of(sample.file)))
        prompt = prompts.stored(prompts.fitting(sample.prompt.text, image_keys(sample.prompt.metadata)))
        completion = prompts.completion(sample.file.text)
    except ConfigError as error:
        raise DataError(f"{sample.file.name}: {error}") from None
    return _after(prompt, completion)


def given_texts(making: SamplingContext, samples: Sequence[GivenSample], texts: Sequence[GivenText]) -> list[Sample]:
    """Return given texts as samples. They have no behavior log-probs: these are NaN, so no loss can use them unseen."""
    return [
        _sample(sample, text, "eos", text=np.frombuffer(shown_text(sample.file).encode(), np.uint8))
        for sample, text in zip(samples, texts, strict=True)
    ]


def given_images(
    samples: Sequence[GivenSample], images: Sequence[GivenImage], coded: Sequence[list[int]]
) -> list[Sample]:
    """Return given images, coded as N ids each, as samples like those of ``given_texts``."""
    return [
        _sample(sample, _after(image.prompt, ids), "length", media=image.pixels)
        for sample, image, ids in zip(samples, images, coded, strict=True)
    ]


def _after(prompt: Sequence[int], ids: Sequence[int]) -> GivenText:
    return GivenText([*prompt, *ids], [0] * len(prompt) + [1] * len(ids))


def _sample(sample: GivenSample, content: GivenText, finish: str, **more: Any) -> Sample:
    unknown = np.full(sum(content.mask), np.nan, np.float32)
    return Sample(
        **sample.columns(),
        **more,
        sigmas=(),
        log_probs=unknown,
        tokens=np.array(content.tokens, np.int32),
        token_mask=np.array(content.mask, np.uint8),
        sampled_log_probs=unknown,
        finish=np.array([FINISHES.index(finish)], np.uint8),
    )
