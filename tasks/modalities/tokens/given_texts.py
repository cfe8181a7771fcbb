"""Given texts as samples: a prompt as in rollouts, then the text and the end token, which are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from configs.errors import ConfigError, DataError
from storage.trajectories.base import Sample
from tasks.inputs.chats import messages_of, shown_text
from tasks.inputs.prompts import image_keys
from tasks.modalities.given import GivenSample
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
    return GivenText([*prompt, *completion], [0] * len(prompt) + [1] * len(completion))


def given_texts(making: SamplingContext, samples: Sequence[GivenSample], texts: Sequence[GivenText]) -> list[Sample]:
    """Return given texts as samples. They have no behavior log-probs: these are NaN, so no loss can use them unseen."""
    made = []
    for sample, text in zip(samples, texts, strict=True):
        unknown = np.full(sum(text.mask), np.nan, np.float32)
        made.append(
            Sample(
                **sample.columns(),
                sigmas=(),
                log_probs=unknown,
                tokens=np.array(text.tokens, np.int32),
                token_mask=np.array(text.mask, np.uint8),
                sampled_log_probs=unknown,
                finish=np.array([FINISHES.index("eos")], np.uint8),
                text=np.frombuffer(shown_text(sample.file).encode(), np.uint8),
            )
        )
    return made
