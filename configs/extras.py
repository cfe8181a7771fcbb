"""Optional packages (extras of flowmill), checked where they are used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from itertools import zip_longest

from flowmill.configs.errors import ConfigError


def require_extra(extra: str, *modules: str, label: str) -> None:
    """Check that the modules of an extra are installed, and no package of it is older than the oldest that was tested.

    Args:
        extra: name of the extra.
        modules: modules of the extra that are imported.
        label: the setting that needs them.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(f"{label} needs '{missing[0]}', which is not installed: pip install 'flowmill[{extra}]'.")
    for package, oldest in oldest_tested(extra).items():
        with suppress(PackageNotFoundError):
            if is_older(installed := version(package), oldest):
                raise ConfigError(
                    f"{label} needs {package} {oldest} or later, and {installed} is installed: pip install --upgrade "
                    f"'flowmill[{extra}]'."
                )


@cache
def oldest_tested(extra: str = "") -> Mapping[str, str]:
    """Return the oldest version of each package of an extra, or of flowmill itself, that it was tested with."""
    bounds = re.compile(r"([\w.-]+)[^;]*>=([\d.]+)[^;]*(?:;.*extra == ['\"](.*)['\"])?")
    with suppress(PackageNotFoundError):
        matches = filter(None, map(bounds.match, requires("flowmill") or ()))
        return {match[1]: match[2] for match in matches if (match[3] or "") == extra}
    return {}


def is_older(one: str, other: str) -> bool:
    """Return whether a version is older than another, by the numbers that they begin with; False if it has none."""
    first, second = ([*map(int, re.findall(r"\d+", re.sub(r"[^\d.].*", "", each)))] for each in (one, other))
    differ = ((ours, theirs) for ours, theirs in zip_longest(first, second, fillvalue=0) if ours != theirs)
    return bool(first) and next((ours < theirs for ours, theirs in differ), False)
