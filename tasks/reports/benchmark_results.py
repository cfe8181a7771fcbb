"""Results of benchmarks: scores by prompt with intervals, written to files and compared in pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from configs.errors import ConfigError, StoreError
from configs.fingerprint import fingerprint
from tasks.algorithms.resampling import Estimate, chance_of_difference, mean_with_interval

#: Version of the result files.
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a benchmark for one model."""

    title: str
    """The benchmark with all its pinned settings."""
    model: str
    """The model."""
    policy: str
    """Its policy artifact."""
    images: str
    """Artifact of the images."""
    rewards: Mapping[str, str]
    """Artifact of each reward's scores."""
    prompts: Sequence[str]
    """The prompts, in order."""
    scores: Mapping[str, Sequence[float]]
    """By reward: the mean over the images of each prompt."""
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By reward: its lowest and highest possible score, for rewards that declare bounds."""

    def estimate(self, reward: str) -> Estimate:
        """Return the mean of a reward with its interval."""
        return mean_with_interval(np.array(self.scores[reward]), bounds=self.bounds.get(reward))

    def write(self, folder: Path) -> Path:
        """Write the result to a new file and return its path.

        Raises:
            StoreError: the file cannot be written; a retry reuses the committed measurements.
        """
        name = f"{self.title.partition(',')[0]}-{self.model}".replace("/", "_").replace("@", "-at-")
        file = folder / f"{name}-{fingerprint([self.title, self.images])[:8]}.json"
        figures = {reward: asdict(self.estimate(reward)) for reward in self.scores}
        text = json.dumps({"format": _FORMAT, **asdict(self), "figures": figures}, indent=1, ensure_ascii=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise StoreError(f"--out '{folder}' cannot be written: {error.strerror}. Name another folder.") from None
        return file


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Two models on one reward, prompt by prompt."""

    difference: Estimate
    """Difference of the means: second minus first."""
    p: float
    """Probability of such a difference between equal models."""


def compare(one: Result, other: Result, reward: str) -> PairedComparison:
    """Compare two results on the prompts of both.

    Raises:
        ConfigError: their benchmarks, prompts or rewards differ.
    """
    if one.title != other.title or list(one.prompts) != list(other.prompts):
        raise ConfigError(
            f"'{one.model}' was measured with {one.title} on {len(one.prompts)} prompts, '{other.model}' with "
            f"{other.title} on {len(other.prompts)}: figures of different settings or prompts are not comparable. "
            "Measure both with the same benchmark."
        )
    if reward not in one.scores or reward not in other.scores:
        raise ConfigError(f"'{reward}' was not scored for both '{one.model}' and '{other.model}'.")
    differences = np.array(other.scores[reward]) - np.array(one.scores[reward])
    low, high = one.bounds.get(reward, (-np.inf, np.inf))
    difference = mean_with_interval(differences).within(low - high, high - low)
    return PairedComparison(difference=difference, p=chance_of_difference(differences))


def read_result(file: Path) -> Result:
    """Return the result in a file.

    Raises:
        ConfigError: the file holds no result.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data.pop("format") != _FORMAT:
            raise ConfigError(f"'{file}' is a result of another version of flowmill. Measure the model again.")
        data.pop("figures")
        bounds = {name: (float(low), float(high)) for name, (low, high) in data.pop("bounds", {}).items()}
        return Result(**data, bounds=bounds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"'{file}' holds no result of 'flowmill benchmark': {error}.") from None
