"""Folders with random miniatures of model families, to try a config with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowmill.configs.errors import ConfigError
from flowmill.configs.suggestions import did_you_mean
from flowmill.models.quickstart import tiny_families
from flowmill.tasks.export.copying import new_folder


def write_miniature(family: str, to: Path, seed: int, report: Callable[[str], None]) -> None:
    """Write the miniature of a family into a folder that does not exist yet, or is empty.

    Raises:
        ConfigError: there is no such family, or the folder is not empty.
    """
    if family not in tiny_families():
        raise ConfigError(f"There is no tiny model of family '{family}'. {did_you_mean(family, tiny_families())}")
    with new_folder(to) as folder:
        report(f"{family}: loading torch")
        from flowmill.models.quickstart.tiny import TinyBuilder

        TinyBuilder(family=family, seed=seed).build(folder, lambda *progress: None)
