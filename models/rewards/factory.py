"""Makes the reward that a config names: an entry of the table, or a custom class or function."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import canonical_json
from flowmill.configs.registry import check_options, create, option_names, resolve
from flowmill.configs.rewards import RewardSection
from flowmill.models.rewards import ARGUMENTS, REWARDS
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Reward, Scores
from flowmill.models.rewards.device_placement import Placed

if TYPE_CHECKING:
    from flowmill.models.rewards.sizes import Takes

_DEVICE = "device"
#: Other names of parameters for the metadata.
_ALSO = ("meta", "info")


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """A function ``(media, prompts, metadata, **options)``, or without ``metadata``, as a reward."""

    function: Callable[..., Scores | Sequence[float] | np.ndarray]
    """See ``Reward.score``."""
    options: Mapping[str, Any]
    needs: Needs

    def score(
        self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata, *references: Any
    ) -> Scores | Sequence[float] | np.ndarray:
        """Return the scores of the function."""
        inputs = (media, prompts, metadata, *references)
        return self.function(*inputs[: len(_arguments(self.function, self.needs))], **self.options)


def make_reward(name: str, options: Mapping[str, Any], *, device: str | None = None) -> Reward:
    """Return a reward, built from its options; raise ConfigError if it does not exist, or an option is unknown, missing
    or refused by it. ``name``: name in the table, or an import string."""
    check_reward(name, options, device=device)
    placed = dict(options) if device is None else {**options, _DEVICE: device}
    label = resolve(REWARDS, name, label="reward")
    if inspect.isfunction(label):
        return FunctionReward(label, placed, needs_of(name, options))
    return create(REWARDS, name, placed, label="reward")


class RewardCache:
    """A cache of rewards: labels of a config with the same reward and options share one."""

    def __init__(
        self,
        locate: Callable[[RewardSection], RewardSection] = lambda section: section,
        check: Callable[[RewardSection], None] = lambda section: None,
    ) -> None:
        """Start without rewards.

        Args:
            locate: gives a reward with the folders of the fits that it names.
            check: raises ConfigError if a reward must not be created now.
        """
        self._locate, self._check = locate, check
        self._lock = threading.Lock()
        self._rewards: dict[str, Reward] = {}
        self._placed: dict[int, Placed] = {}

    def __len__(self) -> int:
        return len(self._rewards)

    def take(self, other: RewardCache) -> None:
        """Add the rewards of another cache, which had the same fits."""
        self._rewards |= other._rewards
        self._placed |= other._placed

    def of(self, section: RewardSection) -> Reward:
        """Return a reward, from the cache or new; its client where a server scores in its place. Raises ConfigError if
        it cannot be created."""
        located = self._locate(section)
        url = None if section.server is None else section.server.url
        place = [section.device, url]
        key = canonical_json({"name": section.name, "options": located.options, "at": place})
        with self._lock:
            if key not in self._rewards:
                self._check(section)
                self._rewards[key] = _make(located)
                self._placed[id(self._rewards[key])] = Placed(self._rewards[key])
            return self._rewards[key]

    def at_work(self, reward: Reward) -> AbstractContextManager[None]:
        """Keep the models of a cached reward on their device inside the context, and until ``rest`` moves them."""
        return self._placed[id(reward)].at_work()

    def rest(self) -> bool:
        """Move the models of idle rewards to host memory; return whether any moved."""
        return any([placed.rest() for placed in self._placed.values()])


def _make(section: RewardSection) -> Reward:
    if section.server is None:
        return make_reward(section.name, section.options, device=section.device)
    from flowmill.models.rewards.remote import RemoteReward

    return RemoteReward(section.server, section.name, section.options)


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


def scored_by_ranks(section: RewardSection, *, nodes: int) -> bool:
    """Return whether ranks score with a reward: on an accelerator, or with several nodes, to use all their cores."""
    return works_on_accelerator(section) or (nodes > 1 and section.server is None)


def needs_of(name: str, options: Mapping[str, Any]) -> Needs:
    """Return the needs of a reward, without making it; raise ConfigError if there is no such reward, or its declared
    needs are not a ``Needs``."""
    label = resolve(REWARDS, name, label="reward")
    needs = label.needs_for(options) if hasattr(label, "needs_for") else getattr(label, "needs", Needs())
    if not isinstance(needs, Needs):
        raise ConfigError(
            f"reward '{name}' declares the needs {needs!r}; they must be a 'flowmill.models.rewards.base.Needs'."
        )
    return needs


def bounds_of(name: str) -> Bounds | None:
    """Return the lowest and the highest score a reward can give, without making it; None if it declares none. Raises
    ConfigError if there is no such reward, or its bounds are invalid."""
    bounds = getattr(resolve(REWARDS, name, label="reward"), "bounds", None)
    if bounds is None:
        return None
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError):
        low, high = 0.0, 0.0
    if not low < high:
        raise ConfigError(f"reward '{name}' declares the bounds {bounds!r}; they must be two numbers, the lower first.")
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
    if not inspect.isfunction(label):
        _check_method(name, label, needs_of(name, options))
    if device is not None and _DEVICE not in valid:
        raise ConfigError(f"reward '{name}' takes no device, but 'device' is '{device}'. Remove it.")


def _check_method(name: str, component: Any, needs: Needs) -> None:
    """Refuse a class whose method ``score`` cannot be called as that of ``Reward``."""
    try:
        parameters = list(inspect.signature(component.score).parameters.values())
    except (TypeError, ValueError):
        # An object that does not show its parameters, such as that of a decorator.
        return
    # A method takes itself first, which a decorator may hide in *args; static and class methods and objects do not.
    attribute = inspect.getattr_static(component, "score")
    is_wrapped = hasattr(attribute, "__wrapped__") and not isinstance(attribute, staticmethod | classmethod)
    is_method = inspect.isfunction(attribute) or is_wrapped
    if is_method and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]
    _check_signature(f"{name}.score", parameters, (*ARGUMENTS, "references") if needs.references else ARGUMENTS)


def _parameters(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Return all parameters of a function, and those that can be positional."""
    parameters = list(inspect.signature(function).parameters.values())
    return parameters, [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _arguments(function: Callable[..., Any], needs: Needs) -> tuple[str, ...]:
    """Return what a reward function is called with: one of two parameters gets no metadata."""
    parameters, positional = _parameters(function)
    if needs.references:
        return (*ARGUMENTS, "references")
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return ARGUMENTS[:2] if len(positional) == 2 and not several else ARGUMENTS


def _function_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Return the options of a reward function; refuse a wrong signature, or a missing option."""
    parameters, positional = _parameters(function)
    arguments = _arguments(function, needs_of(name, options))
    _check_signature(name, parameters, arguments, options)
    rest = [p for p in parameters if p not in positional[: len(arguments)]]
    missing = [p.name for p in rest if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for option in missing:
        if option not in options:
            raise ConfigError(f"reward '{name}' needs the option '{option}'. Set it under its 'options'.")
    if any(p.kind is p.VAR_KEYWORD for p in rest):
        return list(options)
    return [p.name for p in rest if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _is_for(argument: str, parameter: inspect.Parameter) -> bool:
    """Return whether a parameter says by its name and its default, which has no entries, that it is for an argument."""
    default, names = parameter.default, _ALSO if argument == ARGUMENTS[2] else ()
    is_empty = default is None or (isinstance(default, tuple | list | dict) and not default)
    return is_empty and (parameter.name in names or parameter.name.startswith("_"))


def _check_signature(
    name: str, parameters: Sequence[inspect.Parameter], arguments: Sequence[str], options: Collection[str] = ()
) -> None:
    """Refuse parameters that cannot be given the arguments of a reward, or would be given them by mistake."""
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(arguments) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(
            f"reward '{name}' takes ({', '.join(p.name for p in parameters)}), but is called with "
            f"({', '.join(arguments)}). Give it these {len(arguments)} parameters first; options follow."
        )
    for parameter, argument in [*zip(positional, arguments, strict=False)][2:]:
        # It would be given the metadata in place of its default or option, and no score would show it.
        is_option = parameter.name in options or not _is_for(argument, parameter)
        if is_option and parameter.default is not parameter.empty and parameter.name != argument:
            raise ConfigError(
                f"reward '{name}': its parameter '{parameter.name}' has a default, but is given the {argument}. Write "
                f"'*' before it if it is an option, or name it '{argument}'."
            )
