"""Reads the result of a reward: one finite number per sample, or one message that describes the malformed result.
Legend: B samples."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from flowmill.configs.errors import RewardError, without_process
from flowmill.models.rewards.base import Batch, Scores
from flowmill.models.rewards.errors import describe, expected


class MalformedError(RewardError):
    """The result is not one number per sample: no sample is at fault."""


def read_scores(result: Any, name: str, batch: Batch) -> Scores:
    """Return the (B,) float32 scores in a reward's result. Raises MalformedError if it is something else, RewardError
    if a score is not finite; the message names its sample. ``result``: (B,) or (B, 1) numbers as a list, an array or a
    host tensor without gradient, or ``Scores`` of those."""
    if inspect.iscoroutine(result):
        # Without this Python warns later that the coroutine was never awaited.
        result.close()
    scores = result if isinstance(result, Scores) else Scores(result)
    numbers = _numbers(scores.values)
    if numbers is None or numbers.shape not in ((len(batch),), (len(batch), 1)):
        where = describe(batch.origin, 0, batch.prompts) + (" and others" if len(batch) > 1 else "")
        raise MalformedError(
            f"Reward '{name}' returned {described(scores.values)} for {where}. {expected(batch.media)}: one number per "
            f"sample.{_remedy(scores.values)}"
        )
    returned = numbers.reshape(-1)
    with np.errstate(over="ignore"):
        values = returned.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        where, value = describe(batch.origin, int(bad[0]), batch.prompts), returned[bad[0]]
        infinite = value is None or value != value or abs(value) == np.inf
        fault = "not finite" if infinite else "too large for float32"
        raise RewardError(
            f"Reward '{name}' returned {value} for {where} ({len(bad)} of {len(values)} scores are {fault}). A "
            "gradient cannot be made from that: mend the reward, then run again; committed rollouts are kept."
        )
    return Scores(values, None if scores.notes is None else _notes(scores.notes, name, len(batch)))


def _numbers(values: Any) -> np.ndarray | None:
    """Return values as an array of numbers or Nones, of any shape; None if they are not numbers."""
    try:
        numbers = np.asarray(values)
    except Exception:  # noqa: BLE001 - ragged lists, tensors on devices: the message describes the value by its type
        return None
    if numbers.dtype == object:
        if not all(each is None or isinstance(each, Real | Decimal) for each in numbers.flat):
            return None
        # Of integers beyond its range float raises an error; of decimals it returns infinity.
        exact = [+Decimal(each) if isinstance(each, int) else each for each in numbers.flat]
        return np.array(exact, object).reshape(numbers.shape)
    return numbers if numbers.dtype.kind in "biuf" else None


def _notes(notes: Any, name: str, count: int) -> list[str]:
    listed = None if isinstance(notes, str) or not isinstance(notes, Sequence | np.ndarray) else list(notes)
    if listed is None or len(listed) != count or not all(note is None or isinstance(note, str) for note in listed):
        raise MalformedError(
            f"Reward '{name}' returned {described(notes)} as remarks for {count} samples. Return a list with one text "
            "per sample, or None."
        )
    return ["" if note is None else without_process(note) for note in listed]


def described(value: Any) -> str:
    """Return a short description of a value: its type, its shape or length, and its first element."""
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return reprlib.repr(value)
    kind = type(value).__name__
    kind = f"{'an' if kind[:1].lower() in 'aeiou' or kind == 'ndarray' else 'a'} {kind}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{kind} of shape {tuple(shape)}{_placed(value)}{_beginning(value)}"
    if isinstance(value, Mapping):
        return f"{kind} with the keys {reprlib.repr(list(value))}"
    return f"{kind} of {len(value)}{_beginning(value)}" if isinstance(value, list | tuple) else kind


def _placed(value: Any) -> str:
    """Return the dtype, and the properties of a tensor that keep it from becoming an array."""
    dtype, device = getattr(value, "dtype", None), str(getattr(value, "device", "cpu"))
    text = "" if dtype is None else f" in {dtype}"
    text += "" if device == "cpu" else f" on {device}"
    return f"{text} that requires a gradient" if getattr(value, "requires_grad", False) else text


def _beginning(value: Any) -> str:
    """Return a description of the first element of a list, or of an array of anything but numbers."""
    if isinstance(value, np.ndarray):
        return "" if value.dtype.kind in "biuf" or not value.size else f", which begins with {described(value.item(0))}"
    return f", which begins with {described(value[0])}" if isinstance(value, list | tuple) and value else ""


def _remedy(value: Any) -> str:
    first = value[0] if isinstance(value, list | tuple) and value else value
    if hasattr(first, "detach"):
        return " Of a tensor return .detach().float().cpu()."
    if value is None:
        return " It may lack a return."
    if inspect.isgenerator(value):
        return " Return a list of the yielded values."
    return " A reward cannot be async." if inspect.iscoroutine(value) else ""
