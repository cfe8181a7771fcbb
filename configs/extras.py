"""Optional packages (extras of flowmill), checked where they are used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from flowmill.configs.errors import ConfigError

#: Numbers of a version that are compared.
_PARTS = 4


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
        if is_older(installed := _installed(package), oldest):
            raise ConfigError(
                f"{label} needs {package} {oldest} or later, and {installed} is installed: pip install -U "
                f"'flowmill[{extra}]'."
            )


@cache
def oldest_tested(extra: str = "") -> Mapping[str, str]:
    """Return the oldest version of each package of an extra, or of flowmill itself, that it was tested with."""
    try:
        lines = requires("flowmill") or []
    except PackageNotFoundError:
        return {}
    bounds = {line: re.match(r"([\w.-]+)[^;]*>=([\d.]+)", line) for line in lines}
    named = {line: (re.findall(r"extra == ['\"]([^'\"]+)", line) or [""])[0] for line in lines}
    return {match[1]: match[2] for line, match in bounds.items() if match is not None and named[line] == extra}


def is_older(one: str, other: str) -> bool:
    """Return whether a version is older than another, by the numbers that they begin with; False if it has none."""
    first, second = (_numbers(each) for each in (one, other))
    return bool(first) and first < second


def _numbers(release: str) -> list[int]:
    numbers = [*map(int, re.findall(r"\d+", re.sub(r"[^\d.].*", "", release)))]
    return numbers and [*numbers, *[0] * (_PARTS - len(numbers))]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
