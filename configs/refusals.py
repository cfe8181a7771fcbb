"""Refusals of combinations of settings: a room yields them from a function, and the first is raised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that cannot work next to others; the message is ``where why. remedy.``"""

    setting: str
    """The setting that is refused."""
    why: str
    """Why it cannot work."""
    remedy: str
    """How to change it."""
    where: str | None = None
    """Place and finding; by default the setting and its value."""


def setting_value(config: RunConfig, setting: str) -> Any:
    """Return a setting's value; None if its section is absent."""
    section: Any = config
    for each in setting.split("."):
        if section is not None:
            section = section.get(each) if isinstance(section, Mapping) else getattr(section, each)
    return section


def set_settings(config: RunConfig, settings: str) -> Iterator[tuple[str, Any]]:
    """Yield those of several settings, separated by spaces, that are not None, with their values."""
    for setting in settings.split():
        if (value := setting_value(config, setting)) is not None:
            yield setting, value


def never_called(config: RunConfig, settings: str, why: str) -> Iterator[Refusal]:
    """Refuse components of the user's own where nothing would call them; others are ignored."""
    for setting, value in set_settings(config, settings):
        if ":" in getattr(value, "name", value):
            yield Refusal(setting, why, "Remove it", f"{setting} names a component of your own, but")


def refuse(config: RunConfig, refusals: Iterable[Refusal]) -> None:
    """Raise the first refusal, if there is one.

    Raises:
        ConfigError: with the refusal's message.
    """
    for each in refusals:
        where = each.where or f"{each.setting} is {setting_value(config, each.setting)!r}, but"
        raise ConfigError(f"{where} {each.why}. {each.remedy}.")
