"""Refuses combinations of settings: a room lists them as rules, and one runner applies a list in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from configs.errors import ConfigError
from configs.schema import RunConfig


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


class Unused(Rule[F_contra]):
    """Settings that have no effect next to others, and are refused unless they have their defaults."""

    __slots__ = ()


def refuse(rules: Iterable[Rule[F_contra]], facts: F_contra) -> None:
    """Apply rules in their order.

    Raises:
        ConfigError: one applies.
    """
    config = facts if isinstance(facts, RunConfig) else facts.config
    for rule in rules:
        for setting in rule.setting.split():
            value, default = _value_and_default(config, setting)
            if value == (default if isinstance(rule, Unused) else None):
                continue
            if found := rule.when(facts, value):
                text = f"{rule.where} {rule.why}. {rule.remedy}."
                names = {"setting": setting, "value": value, "found": found, "facts": facts}
                raise ConfigError(text.format(**dict(config), **names))


def _value_and_default(config: RunConfig, setting: str) -> tuple[Any, Any]:
    """Return a setting's value and its default; None and None if its section is absent."""
    section: Any = config
    *path, name = setting.split(".")
    for each in path:
        section = getattr(section, each)
        if section is None:
            return None, None
    return getattr(section, name), type(section).model_fields[name].get_default(call_default_factory=True)
