"""Optional packages (extras of flowmill), checked where they are used."""

from __future__ import annotations

from importlib.util import find_spec

from flowmill.configs.errors import ConfigError


def require_extra(extra: str, *modules: str, label: str) -> None:
    """Check that the modules of an extra are installed.

    Args:
        extra: name of the extra.
        modules: modules of the extra that are imported.
        label: the setting that needs them.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(f"{label} needs '{missing[0]}', which is not installed: pip install 'flowmill[{extra}]'.")
