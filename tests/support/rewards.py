"""Rewards for tests, as a user would write them: plain classes in a module of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from flowmill.models.rewards.base import Batch, Needs, Reward, Scores, declare
from flowmill.models.rewards.invocation import Handling, score


class Constant:
    """Every image is worth the same."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        return [0.7] * len(media)


class Fading:
    """Bright images are good; a test may lower all scores from some call on."""

    lowered = 0.0

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        return [float(image.mean()) / 255 - self.lowered for image in media]


class FadingWithoutTheWorst(Fading):
    """As it, but every second prompt is much worse, and has no score once all are lowered."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        bad = [int(prompt.split()[-1].strip('"')) % 2 for prompt in prompts]
        scores = super().score(media, prompts, metadata)
        worst = float("nan") if Fading.lowered else -1.0
        return [score + worst if odd else score for score, odd in zip(scores, bad, strict=True)]


class NotANumber:
    """No image has a score."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        return [float("nan")] * len(media)


class NotANumberLater:
    """A score for the trial, and none for any image."""

    calls = 0

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        self.calls += 1
        return [1.0 if self.calls == 1 else float("nan")] * len(media)


class Wanted:
    """The score is in the prompt's metadata."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        return [float(item["wanted"]) for item in metadata]


class Crash:
    """A bug in somebody's reward."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        return [1 / 0.0]


class Flaky:
    """Loses the connection twice, after it was tried once."""

    calls = 0

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        type(self).calls += 1
        if type(self).calls in (2, 3):
            raise ConnectionResetError("peer went away")
        return [float(i) for i in range(len(media))]


class Unreachable:
    """Loses the connection over more than four images as long as a file is there, and notes in it whenever it does."""

    def __init__(self, note: str) -> None:
        """Bind to the file."""
        self._note = Path(note)

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        if len(media) > 4 and self._note.exists():
            with self._note.open("a") as file:
                file.write("lost\n")
            raise ConnectionResetError("peer went away")
        return [float(i) for i in range(len(media))]


class Restless:
    """Never says the same twice, as a judge over the network may."""

    calls = 0

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        type(self).calls += 1
        return [(i * 7 + type(self).calls) % 5 + 0.01 * type(self).calls for i in range(len(media))]


class OnAccelerator:
    """Brightness, scored by the ranks; the note says by which."""

    needs = Needs(accelerated=True)

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        time.sleep(1)  # long enough for the other rank to take a shard too
        brightness = media.reshape(len(media), -1).mean(1, dtype=np.float64).astype(np.float32)
        return Scores(brightness, [os.environ.get("RANK", "none")] * len(media))


def brightness(
    media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], channel: int = 0
) -> np.ndarray:
    """A function as a reward: the mean of one channel, 0 to 1."""
    return np.asarray(media[..., channel].reshape(len(media), -1).mean(1) / 255)


def strict(media: np.ndarray, prompts: Sequence[str], strictness: bool = False) -> list[float]:
    """Its option stands where metadata are."""
    return [0.5 if strictness else 1.0 for _ in media]


def may_read(media: np.ndarray, prompts: Sequence[str], meta: Any = None) -> list[float]:
    """Reads metadata under another name, if there are any."""
    return [1.0 if meta else 0.0 for _ in media]


def polite(media: np.ndarray, prompts: Sequence[str], forbidden: Sequence[str] = ()) -> list[float]:
    """Its option stands where metadata are, and would count them."""
    return [-float(len(forbidden)) for _ in media]


_ARRAY = np.ones(2)


def weighted(media: np.ndarray, prompts: Sequence[str], meta: Any = _ARRAY) -> list[float]:
    """Its option, an array, stands where metadata are."""
    return [float(sum(meta)) for _ in media]


class Templated:
    """The option of its method stands where metadata are."""

    def score(self, media: np.ndarray, prompts: Sequence[str], template: Any = None) -> list[float]:
        return [0.0 if template is None else 9.0 for _ in media]


def _measured(method: Any) -> Any:
    def call(*arguments: Any, **others: Any) -> Any:
        return method(*arguments, **others)

    return call


class Measured:
    """Its method is behind a decorator that does not tell its parameters."""

    @_measured
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Any) -> list[float]:
        return [1.0] * len(media)


class _Shown:
    """A decorator as a class, whose object hides the parameters."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else partial(self.function, owner)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class _Bound(_Shown):
    """One that binds at once."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return partial(self.function, owner)


class Timed:
    """Its method is behind such a decorator."""

    @_Shown
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Any) -> list[float]:
        return [1.0] * len(media)


class BoundAtOnce:
    """Its method is behind the other."""

    @_Bound
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Any) -> list[float]:
        return [1.0] * len(media)


class Called:
    """Its method is an object, which takes no ``self``."""

    score = partial(lambda value, media, prompts, metadata: [value] * len(media), 1.0)


@declare(references=True)
def near(media: np.ndarray, prompts: Sequence[str], metadata: Any, scale: float = 2.0) -> list[float]:
    """Its option stands where references are."""
    return [scale for _ in media]


@declare(references=True)
def informed(media: np.ndarray, prompts: Sequence[str], metadata: Any, info: Any = None) -> list[float]:
    """Its option, of a name for metadata, stands where references are."""
    return [1.0 for _ in media]


class Cached:
    """Scores without metadata behind a cache, which is no function and passes its object on."""

    @lru_cache  # noqa: B019
    def score(self, media: np.ndarray, prompts: Sequence[str]) -> list[float]:
        return [1.0 for _ in media]


class OfImages:
    """Scores without metadata, which a class cannot."""

    def score(self, media: np.ndarray, prompts: Sequence[str]) -> list[float]:
        """Return ones."""
        return [1.0 for _ in media]


def aimed(
    media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *, aim: float
) -> np.ndarray:
    """One with an option that must be set."""
    return -np.abs(brightness(media, prompts, metadata) - aim)


def of_images(media: np.ndarray) -> list[float]:
    """No reward: nobody tells it the prompts."""
    return [0.0] * len(media)


NUMBER = 3


def scored(
    reward: Reward,
    name: str,
    media: np.ndarray,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    **handling: Any,
) -> Scores:
    """Return the scores of samples of no group and no origin."""
    return score(reward, name, Batch(media=media, prompts=prompts, metadata=metadata), Handling(**handling))


class Killing:
    """Counts its calls with several samples in a file, if it exists, and kills its process at some."""

    def __init__(self, note: str, at: Sequence[int]) -> None:
        self._note, self._at = Path(note), at

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        if len(prompts) > 1 and self._note.exists():
            with self._note.open("a") as note:
                note.write("call\n")
            if self._note.read_text().count("call") in self._at:
                os.kill(os.getpid(), signal.SIGKILL)
        return [float(len(prompt)) for prompt in prompts]
