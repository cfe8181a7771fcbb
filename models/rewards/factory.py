"""Makes the reward that a config names: an entry of the table, or a custom class or function."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import ConfigError
from configs.fingerprint import canonical_json
from configs.registry import check_options, create, option_names, resolve
from configs.rewards import RewardSection
from models.rewards import GIVEN, REWARDS
from models.rewards.base import Bounds, Metadata, Needs, Reward, Scores
from models.rewards.device_placement import Placed, modules_of, spread_over

if TYPE_CHECKING:
    from models.rewards.sizes import Takes
    from models.weights.sharding import Sharding

_DEVICE = "device"


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """A function ``(media, prompts, metadata, **options)`` as a reward."""

    function: Callable[..., Scores | Sequence[float] | np.ndarray]
    """See ``Reward.score``."""
    options: Mapping[str, Any]
    needs: Needs

    def score(
        self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata, *references: Any
    ) -> Scores | Sequence[float] | np.ndarray:
        """Return the scores of the function."""
        return self.function(media, prompts, metadata, *references, **self.options)


def make_reward(name: str, options: Mapping[str, Any], *, device: str | None = None) -> Reward:
    """Return a reward, built from its options; raise ConfigError if it does not exist, or an option is unknown, missing
    or refused by it. ``name``: name in the table, or an import string."""
    check_reward(name, options, device=device)
    placed = dict(options) if device is None else {**options, _DEVICE: device}
    label = resolve(REWARDS, name, label="reward")
    if inspect.isfunction(label):
        return FunctionReward(label, placed, needs_of(name, options))
    return create(REWARDS, name, placed, label="reward")


class MadeRewards:
    """A cache of rewards: labels of a config with the same reward and options share one."""

    def __init__(self, locate: Callable[[RewardSection], RewardSection] = lambda section: section) -> None:
        self.locate = locate
        """Gives a reward with the folders of the fits that it names."""
        self.sharding: Sharding | None = None
        """Sharding of the models of rewards with ``spread``; None: this process holds them whole."""
        self._lock = threading.Lock()
        self._made: dict[str, Reward] = {}
        self._placed: dict[int, Placed] = {}

    def __len__(self) -> int:
        return len(self._made)

    def of(self, section: RewardSection) -> Reward:
        """Return a reward, from the cache or new; its client where a server scores in its place. Raises ConfigError if
        it cannot be made."""
        section = self.locate(section)
        url = None if section.server is None else section.server.url
        sharding = self.sharding if section.spread else None
        place = [section.device, url, sharding is not None]
        key = canonical_json({"name": section.name, "options": section.options, "at": place})
        with self._lock:
            if key not in self._made:
                with spread_over(sharding):
                    self._made[key] = _make(section)
                if sharding is not None:
                    _check_spread(section.slot, self._made[key])
                self._placed[id(self._made[key])] = Placed(self._made[key])
            return self._made[key]

    def at_work(self, reward: Reward) -> AbstractContextManager[None]:
        """Keep the models of a reward made here on their device inside the context, and until ``rest`` moves them."""
        return self._placed[id(reward)].at_work()

    def rest(self) -> bool:
        """Move the models of idle rewards to host memory; return whether any moved."""
        return any([placed.rest() for placed in self._placed.values()])


def _make(section: RewardSection) -> Reward:
    if section.server is None:
        return make_reward(section.name, section.options, device=section.device)
    from models.rewards.remote import RemoteReward

    return RemoteReward(section.server, section.name, section.options)


def _check_spread(label: str, reward: Reward) -> None:
    """Refuse a reward with ``spread`` if none of its models is sharded."""
    from models.weights.sharding import sharded_parts

    if not any(True for module in modules_of(reward) for _ in sharded_parts(module)):
        raise ConfigError(
            f"rewards: '{label}' has spread set and says that it can be, but every rank holds all of its models: place "
            "them by 'models.rewards.device_placement.settled', and keep them as attributes."
        )


def check_section(section: RewardSection) -> None:
    """Check a reward of a config without making it; a server is not contacted. Raises ConfigError if it does not exist,
    or does not know its options."""
    if section.server is None:
        check_reward(section.name, section.options, device=section.device)


def works_on_accelerator(section: RewardSection) -> bool:
    """Return whether a reward works on the accelerator of the process that scores with it."""
    if section.server is not None or section.device == "cpu":
        return False
    return needs_of(section.name, section.options).accelerated


def why_not_spread(section: RewardSection) -> tuple[str, str] | None:
    """Return why ranks cannot make a reward's calls together, and a remedy; None: they can."""
    if section.server is not None:
        return "a server scores in its place", "Remove one of the two"
    needs = needs_of(section.name, section.options)
    if not needs.spreads or needs.groupwise:
        declared = ((name, getattr(resolve(REWARDS, name, label="reward"), "needs", None)) for name in REWARDS)
        able = [name for name, known in declared if isinstance(known, Needs) and known.spreads]
        return (
            "how often it runs its layers depends on the samples of a call, so that ranks cannot make calls together",
            f"Remove it; rewards that can: {', '.join(able)}",
        )
    if section.device is not None:
        return f"it has the device '{section.device}'", "Remove one of the two; each rank has its own device"
    if section.excludes:
        return (
            "on_failure is not 'stop', so that a sample that fails is called alone, which the other ranks would miss",
            "Set on_failure to stop",
        )
    if (section.batch_size or needs.batch_size) is None:
        return "its calls have as many rows as a shard, so that ranks' calls differ", "Set its batch_size"
    return None


def scored_by_ranks(section: RewardSection, *, nodes: int) -> bool:
    """Return whether ranks score with a reward: on an accelerator, or with several nodes, to use all their cores."""
    return works_on_accelerator(section) or (nodes > 1 and section.server is None)


def needs_of(name: str, options: Mapping[str, Any]) -> Needs:
    """Return the needs of a reward, without making it; raise ConfigError if there is no such reward, or its declared
    needs are not a ``Needs``."""
    label = resolve(REWARDS, name, label="reward")
    needs = label.needs_for(options) if hasattr(label, "needs_for") else getattr(label, "needs", Needs())
    if not isinstance(needs, Needs):
        raise ConfigError(f"reward '{name}' declares the needs {needs!r}; they must be a 'models.rewards.base.Needs'.")
    return needs


def bounds_of(name: str) -> Bounds | None:
    """Return the lowest and the highest score a reward can give, without making it; None if it declares none. Raises
    ConfigError if there is no such reward, or its bounds are invalid."""
    found = getattr(resolve(REWARDS, name, label="reward"), "bounds", None)
    if found is None:
        return None
    try:
        low, high = map(float, found)
    except (TypeError, ValueError):
        low, high = 0.0, 0.0
    if not low < high:
        raise ConfigError(f"reward '{name}' declares the bounds {found!r}; they must be two numbers, the lower first.")
    return low, high


def takes_of(name: str, options: Mapping[str, Any]) -> Takes | None:
    """Return the memory that the models of a reward need on a device; None if it does not declare it."""
    label = resolve(REWARDS, name, label="reward")
    return label.takes(options) if hasattr(label, "takes") else None


def check_reward(name: str, options: Mapping[str, Any], *, device: str | None = None) -> None:
    """Check that a reward exists and knows its options, without making it."""
    label = resolve(REWARDS, name, label="reward")
    if _DEVICE in options:
        raise ConfigError(
            f"reward '{name}': 'device' is among its options, but the device of a reward does not change its scores. "
            "Set 'device' next to 'options'."
        )
    valid = _function_options(name, label, options) if inspect.isfunction(label) else option_names(label)
    check_options(label, name, options, label="reward", valid=valid)
    if device is not None and _DEVICE not in valid:
        raise ConfigError(f"reward '{name}' takes no device, but 'device' is '{device}'. Remove it.")


def _function_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Return the options of a reward function; refuse a wrong signature, or a missing option."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = (*GIVEN, "references") if needs_of(name, options).references else GIVEN
    if len(positional) < len(given) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(
            f"reward '{name}' takes ({', '.join(p.name for p in parameters)}), but is called with "
            f"({', '.join(given)}). Give it these {len(given)} parameters first; options follow."
        )
    rest = [p for p in parameters if p not in positional[: len(given)]]
    missing = [p.name for p in rest if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for option in missing:
        if option not in options:
            raise ConfigError(f"reward '{name}' needs the option '{option}'. Set it under its 'options'.")
    if any(p.kind is p.VAR_KEYWORD for p in rest):
        return list(options)
    return [p.name for p in rest if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
