"""Given texts as samples: a prompt as in rollouts, then the text and the end token, which are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from configs.errors import ConfigError, DataError
from models.policies.language_model_folders import context_length_of, load_tokenizer
from models.text.control_tokens import first_mark, plain_ids
from storage.trajectories.base import Sample
from tasks.inputs.components import tokens_of
from tasks.modalities.given import GivenSample
from tasks.modalities.samplers import SamplingContext
from tasks.modalities.tokens.prompts import Prompts
from tasks.modalities.tokens.text import FINISHES
from tasks.runs.context import RunContext

#: The policy column of samples that no policy of the run made.
GIVEN = "given"


class GivenText(NamedTuple):
    """Token ids of one given text."""

    prompt: list[int]
    completion: list[int]


_PROMPTS: WeakKeyDictionary[RunContext, tuple[Prompts, object]] = WeakKeyDictionary()


def read_text(making: SamplingContext, sample: GivenSample) -> GivenText:
    """Return the token ids of a prompt and its given text, which ends with the tokenizer's end token.

    Raises:
        DataError: the text is longer than ``rollout.tokens.max_new``, or a control token in it cannot be read as text.
    """
    prompts, tokenizer = _reader(making.context)
    text, name = sample.file.text, sample.file.name
    if text is None:
        raise DataError(f"{name} is a file, but the policy writes texts. Name a column of texts in data.sample.")
    mark = first_mark(tokenizer, text)
    found = plain_ids(tokenizer, text) if mark else tokenizer(text, add_special_tokens=False).input_ids  # type: ignore[operator]
    if found is None:
        raise DataError(f"{name} holds {mark!r}, which the tokenizer cannot read as text. Write it in another way.")
    ids = [int(token) for token in found]
    end = getattr(tokenizer, "eos_token_id", None)
    ids += [] if end is None else [int(end)]
    most = prompts.section.max_new
    if len(ids) > most:
        raise DataError(f"{name} has {len(ids)} tokens, but rollout.tokens.max_new is {most}. Raise it, or shorten it.")
    try:
        return GivenText(prompts.ids(sample.prompt.text), ids)
    except ConfigError as error:
        raise DataError(f"{name}: {error}") from None


def _reader(context: RunContext) -> tuple[Prompts, object]:
    found = _PROMPTS.get(context)
    if found is None:
        folder = context.base_folder
        tokenizer = load_tokenizer(folder)
        found = Prompts(tokenizer, tokens_of(context.config), context_length_of(folder)), tokenizer
        _PROMPTS[context] = found
    return found


def given_texts(making: SamplingContext, samples: Sequence[GivenSample], texts: Sequence[GivenText]) -> list[Sample]:
    """Return given texts as samples. They have no behavior log-probs: these are NaN, so no loss can use them unseen."""
    made = []
    for sample, (prompt, completion) in zip(samples, texts, strict=True):
        unknown = np.full(len(completion), np.nan, np.float32)
        mask = np.zeros(len(prompt) + len(completion), np.uint8)
        mask[len(prompt) :] = 1
        made.append(
            Sample(
                sample_id=sample.name,
                prompt_id=sample.prompt.id,
                group_id=sample.group,
                prompt=sample.prompt.text,
                metadata=sample.prompt.metadata,
                epoch=0,
                replica=sample.replica,
                seed=0,
                policy=GIVEN,
                sigmas=(),
                log_probs=unknown,
                tokens=np.array([*prompt, *completion], np.int32),
                token_mask=mask,
                sampled_log_probs=unknown,
                finish=np.array([FINISHES.index("eos")], np.uint8),
                text=np.frombuffer(str(sample.file.text).encode(), np.uint8),
            )
        )
    return made
