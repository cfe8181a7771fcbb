"""Optional packages (extras of flowmill), checked where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

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
    from packaging.requirements import Requirement

    try:
        requirements = [*map(Requirement, requires("flowmill") or ())]
    except PackageNotFoundError:
        return {}
    own = [each for each in requirements if (each.marker.evaluate({"extra": extra}) if each.marker else not extra)]
    return {each.name: bound.version for each in own for bound in each.specifier if bound.operator == ">="}


def is_older(one: str, other: str) -> bool:
    """Return whether a version is older than another, whatever follows its release; False if it is no version."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(Version(one).base_version) < Version(other)
    except InvalidVersion:
        return False
