"""Parses the answers of completion servers; an answer that does not match the request is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowmill.models.maths.generation import Completion, Finish, TokenSampling

#: Rounding may put the log-prob of a certain token a little above 0.
_ABOVE = 1e-3


class Malformed(Exception):
    """An answer that cannot be used; the message consists of sentences."""


def completion_of(answer: Any, prompt: Sequence[int], sampling: TokenSampling, vocabulary: int) -> Completion:
    """Return the completion in an answer; its finish reason is derived from its tokens. A server may notice a stop text
    late: tokens after the one that completed it are dropped. Raises Malformed if there is none, or it contradicts the
    request."""
    choice = _choice(answer)
    ids = _ids(choice, sampling.max_new, vocabulary)
    seen = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
    if seen is not None and seen != list(prompt):
        raise Malformed(
            f"its prompt was not the {len(prompt)} token ids it was sent. It must take prompts as ids, uncut and with "
            "nothing put before them."
        )
    log_probs = _log_probs(choice, len(ids))
    length, finish = _ended(ids, sampling)
    return Completion(ids=ids[:length], log_probs=log_probs[:length], finish=finish)


def prompt_log_probs_of(answer: Any, ids: Sequence[int]) -> list[float]:
    """Return a server's log-probs of all tokens of a text but the first, from ``prompt_logprobs`` or an echo; raise
    Malformed if they are missing."""
    choice = _choice(answer)
    values = choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
    if values is None:
        stated = choice.get("logprobs")
        values = stated.get("token_logprobs") if isinstance(stated, Mapping) else None
    if not isinstance(values, list) or len(values) < len(ids):
        raise Malformed(
            f"it has no log-probs of the {len(ids)} tokens of a prompt. Set the engine's option 'proof' to the form it "
            "supports, 'prompt_logprobs' or 'echo'."
        )
    return [_of_token(each, token) for each, token in zip(values[1 : len(ids)], ids[1:], strict=True)]


def _of_token(stated: Any, token: int) -> float:
    """Return the log-prob of a token: the number itself, or its entry in a mapping by ids."""
    value = stated
    if isinstance(stated, Mapping):
        entry = stated.get(str(token))
        value = entry.get("logprob") if isinstance(entry, Mapping) else entry
    return _number(value)


def _choice(answer: Any) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list):
        raise Malformed("it has no choices.")
    if len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise Malformed(f"it has {len(choices)} choices, where one was asked for.")
    return choices[0]


def _ids(choice: Mapping[str, Any], most: int, vocabulary: int) -> list[int]:
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        raise Malformed(
            "it has text but no token ids, and tokenizing text again may give other tokens. The server must "
            "know return_token_ids; vLLM does from 0.10.2 on."
        )
    if not 1 <= len(ids) <= most:
        raise Malformed(f"it has {len(ids)} tokens, where 1 to {most} were asked for.")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise Malformed(
                f"it has the token id {str(token)[:40]}, but the policy's vocabulary has the ids 0 to "
                f"{vocabulary - 1}. The server has another model."
            )
    return ids


def _log_probs(choice: Mapping[str, Any], count: int) -> list[float]:
    stated = choice.get("logprobs")
    values = stated.get("token_logprobs") if isinstance(stated, Mapping) else None
    if not isinstance(values, list):
        raise Malformed("it has no log-probs of its tokens (logprobs.token_logprobs), which were asked for.")
    if len(values) != count:
        raise Malformed(f"it has {len(values)} log-probs for {count} tokens.")
    return [_number(value) for value in values]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e6 < value < _ABOVE:
        raise Malformed(f"it says {str(value)[:40]} is the log-prob of a token, which is no number at or below 0.")
    return float(value)


def _ended(ids: Sequence[int], sampling: TokenSampling) -> tuple[int, Finish]:
    """Return the length of a completion in tokens, and its finish reason."""
    for length, token in enumerate(ids, 1):
        if token in sampling.eos:
            if length < len(ids):
                raise Malformed(f"its token {length} of {len(ids)} ends a text, but it goes on.")
            return length, "eos"
        if sampling.stopped(ids[:length]):
            return length, "stop"
    if len(ids) < sampling.max_new:
        raise Malformed(
            f"it ended after {len(ids)} of {sampling.max_new} tokens with neither an end token nor a stop text. The "
            "server must have no other end conditions: its context must have room for prompt and completion."
        )
    return len(ids), "length"
