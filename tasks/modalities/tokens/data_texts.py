"""Texts and images of data as samples: a prompt as in rollouts, then the tokens that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flowmill.configs.errors import ConfigError, DataError
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.inputs.chats import messages_of, shown_text
from flowmill.tasks.inputs.prompts import image_keys
from flowmill.tasks.modalities.data_images import read_media
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.samplers import SamplingContext
from flowmill.tasks.modalities.tokens.data_chats import chat_tokens
from flowmill.tasks.modalities.tokens.run_prompts import prompts_of
from flowmill.tasks.modalities.tokens.text import FINISHES


class DataText(NamedTuple):
    """Token ids of a prompt and a text, or of a chat."""

    tokens: list[int]
    """All ids."""
    mask: list[int]
    """1 for each token that is trained on."""
    text: str = ""
    """The text as rewards and people see it."""


class DataImage(NamedTuple):
    """Token ids of a prompt, and an image."""

    prompt: list[int]
    """All ids of the prompt."""
    pixels: np.ndarray
    """(H, W, 3) uint8."""


def read_image(making: SamplingContext, sample: DataSample) -> DataImage:
    """Return the token ids of a prompt, and its image."""
    pixels, prompts = read_media(making, sample, sample.file.read()), prompts_of(making.context)
    try:
        return DataImage(list(prompts.stored(prompts.fitting(sample.prompt.text))), pixels)
    except ConfigError as error:
        raise DataError(f"{sample.file.name}: {error}") from None


def read_text(making: SamplingContext, sample: DataSample) -> DataText:
    """Return the token ids of a prompt and its text, which ends with an end token; or of a chat."""
    if sample.file.text is None:
        raise DataError(
            f"{sample.file.name} is a file, but the policy writes texts. Set data.columns.sample to a column of texts."
        )
    prompts = prompts_of(making.context)
    try:
        if sample.file.is_chat:
            return DataText(*chat_tokens(prompts, messages_of(sample.file)), shown_text(sample.file))
        prompt = prompts.stored(prompts.fitting(sample.prompt.text, image_keys(sample.prompt.metadata)))
        completion, text = prompts.completion(sample.file.text)
    except ConfigError as error:
        raise DataError(f"{sample.file.name}: {error}") from None
    return _after(prompt, completion, text)


def text_samples(making: SamplingContext, samples: Sequence[DataSample], texts: Sequence[DataText]) -> list[Sample]:
    """Return texts of data as samples. Their behavior log-probs are NaN, so no loss can use them unseen."""
    return [
        _sample(sample, text, "eos", text=np.frombuffer(text.text.encode(), np.uint8))
        for sample, text in zip(samples, texts, strict=True)
    ]


def image_samples(
    samples: Sequence[DataSample], images: Sequence[DataImage], coded: Sequence[list[int]]
) -> list[Sample]:
    """Return images of data, coded as N ids each, as samples like those of ``text_samples``."""
    return [
        _sample(sample, _after(image.prompt, ids), "length", media=image.pixels)
        for sample, image, ids in zip(samples, images, coded, strict=True)
    ]


def _after(prompt: Sequence[int], ids: Sequence[int], text: str = "") -> DataText:
    return DataText([*prompt, *ids], [0] * len(prompt) + [1] * len(ids), text)


def _sample(sample: DataSample, content: DataText, finish: str, **more: Any) -> Sample:
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
