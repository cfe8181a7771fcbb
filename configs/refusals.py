"""Refuses combinations of settings: a room lists them as rules, and one runner applies a list in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig


class Facts(Protocol):
    """A config, and what a room derives from it for its rules."""

    @property
    def config(self) -> RunConfig:
        """The config."""
        ...


F_contra = TypeVar("F_contra", bound=RunConfig | Facts, contravariant=True)


@dataclass(frozen=True, slots=True)
class Rule(Generic[F_contra]):
    """A setting that cannot work next to others.

    The message is ``where why. remedy.`` In these, ``{setting}`` and ``{value}`` are those refused, ``{found}`` is the
    result of ``when``, ``{advantage.std}`` another setting, and ``{facts.algorithm}`` an attribute of the facts.
    """

    setting: str
    """A setting, or several, separated by spaces, of which each is refused; one that is None is not."""
    when: Callable[[F_contra, Any], object]
    """Gets the facts, or the config in a room without facts, and the setting's value; the rule applies if the result is
    true."""
    why: str
    """Why that cannot work."""
    remedy: str
    """How to change it."""
    where: str = field(default="{setting} is {value!r}, but", kw_only=True)
    """Place and finding."""


def never_called(settings: str, why: str, when: Callable[[Any], bool] = lambda facts: True) -> Rule[Any]:
    """Return the rule that refuses a component of the user's own where nothing would call it; others are ignored."""
    return Rule(
        settings,
        lambda facts, value: when(facts) and ":" in getattr(value, "name", value),
        why,
        "Remove it",
        where="{setting} names a component of your own, but",
    )


def refuse(rules: Iterable[Rule[F_contra]], facts: F_contra) -> None:
    """Apply rules in their order."""
    config = facts if isinstance(facts, RunConfig) else facts.config
    for rule in rules:
        for setting in rule.setting.split():
            value = _value(config, setting)
            if value is None:
                continue
            if finding := rule.when(facts, value):
                text = f"{rule.where} {rule.why}. {rule.remedy}."
                names = {"setting": setting, "value": value, "found": finding, "facts": facts}
                raise ConfigError(text.format(**dict(config), **names))


def _value(config: RunConfig, setting: str) -> Any:
    """Return a setting's value; None if its section is absent."""
    section: Any = config
    for each in setting.split("."):
        section = None if section is None else getattr(section, each)
    return section
