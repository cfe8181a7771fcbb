"""Makes a reward of what a config names: an entry of the table, or a class or function of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.errors import ConfigError
from configs.fingerprint import canonical_json
from configs.registry import check_options, create, option_names, resolve
from models.rewards import GIVEN, REWARDS
from models.rewards.base import Reward, Scores


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """A function ``(media, prompts, metadata, **options)`` as a reward."""

    function: Callable[..., Scores | Sequence[float] | np.ndarray]
    """See ``Reward.score``."""
    options: Mapping[str, Any]
    """By name."""

    def score(
        self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores | Sequence[float] | np.ndarray:
        """Return what the function does."""
        return self.function(media, prompts, metadata, **self.options)


def make_reward(name: str, options: Mapping[str, Any]) -> Reward:
    """Return a reward, built from its options.

    Raises:
        ConfigError: there is none, or an option is unknown, missing or refused by it.
    """
    what = _checked(name, options)
    if inspect.isfunction(what):
        return FunctionReward(what, dict(options))
    made: Reward = create(REWARDS, name, options, what="reward")
    return made


class MadeRewards:
    """Rewards made once each, however many labels of a config stand for the same one with the same options."""

    def __init__(self) -> None:
        """Start with none."""
        self._made: dict[str, Reward] = {}

    def __len__(self) -> int:
        """Return how many were made."""
        return len(self._made)

    def of(self, name: str, options: Mapping[str, Any]) -> Reward:
        """Return a reward, made now or before.

        Raises:
            ConfigError: it cannot be made.
        """
        key = canonical_json([name, dict(options)])
        if key not in self._made:
            self._made[key] = make_reward(name, options)
        return self._made[key]


def check_reward(name: str, options: Mapping[str, Any]) -> None:
    """Check that a reward exists and knows its options, without making it.

    Raises:
        ConfigError: it does not.
    """
    _checked(name, options)


def works_on_accelerator(name: str) -> bool:
    """Return whether a reward says that it works on the accelerator."""
    return bool(getattr(resolve(REWARDS, name, what="reward"), "accelerated", False))


def _checked(name: str, options: Mapping[str, Any]) -> Any:
    what = resolve(REWARDS, name, what="reward")
    if inspect.isfunction(what):
        valid = _function_options(name, what, options)
    elif callable(getattr(what, "score", None)):
        valid = option_names(what)
    else:
        raise ConfigError(
            f"reward '{name}' is neither a function of (media, prompts, metadata) nor a class with the method "
            "'score(media, prompts, metadata)'."
        )
    check_options(name, options, valid, what="reward")
    return what


def _function_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Return the options a reward function takes.

    Raises:
        ConfigError: it cannot be called as a reward is, or an option it needs is missing.
    """
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < GIVEN and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(
            f"reward '{name}' takes ({', '.join(p.name for p in parameters)}), but is called with (media, prompts, "
            "metadata). Give it these three parameters first; options follow."
        )
    rest = [p for p in parameters if p not in positional[:GIVEN]]
    missing = [p.name for p in rest if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for option in missing:
        if option not in options:
            raise ConfigError(f"reward '{name}' needs the option '{option}'. Set it under its 'options'.")
    if any(p.kind is p.VAR_KEYWORD for p in rest):
        return list(options)
    return [p.name for p in rest if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
