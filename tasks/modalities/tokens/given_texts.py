"""Given texts as samples: a prompt as in rollouts, then the text and the end token, which are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from configs.errors import ConfigError, DataError
from storage.trajectories.base import Sample
from tasks.modalities.given import GivenSample
from tasks.modalities.samplers import SamplingContext
from tasks.modalities.tokens.run_prompts import read_prompts
from tasks.modalities.tokens.text import FINISHES


class GivenText(NamedTuple):
    """Token ids of one given text."""

    prompt: list[int]
    completion: list[int]


def read_text(making: SamplingContext, sample: GivenSample) -> GivenText:
    """Return the token ids of a prompt and its given text, which ends with the tokenizer's end token.

    Raises:
        DataError: it is a file, or cannot be tokenized within the limits of ``rollout.tokens``.
    """
    if sample.file.text is None:
        raise DataError(
            f"{sample.file.name} is a file, but the policy writes texts. Set data.sample to a column of texts."
        )
    prompts = read_prompts(making.context).prompts
    try:
        return GivenText(prompts.of(sample.prompt), prompts.completion(sample.file.text))
    except ConfigError as error:
        raise DataError(f"{sample.file.name}: {error}") from None


def given_texts(making: SamplingContext, samples: Sequence[GivenSample], texts: Sequence[GivenText]) -> list[Sample]:
    """Return given texts as samples. They have no behavior log-probs: these are NaN, so no loss can use them unseen."""
    made, stored = [], read_prompts(making.context).prompts.stored
    for sample, (prompt, completion) in zip(samples, texts, strict=True):
        unknown = np.full(len(completion), np.nan, np.float32)
        mask = np.zeros(len(prompt) + len(completion), np.uint8)
        mask[len(prompt) :] = 1
        made.append(
            Sample(
                **sample.columns(),
                sigmas=(),
                log_probs=unknown,
                tokens=np.array([*stored(prompt), *completion], np.int32),
                token_mask=mask,
                sampled_log_probs=unknown,
                finish=np.array([FINISHES.index("eos")], np.uint8),
                text=np.frombuffer(str(sample.file.text).encode(), np.uint8),
            )
        )
    return made
