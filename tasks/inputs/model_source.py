"""Checks of the start weights of a run: a builder, a folder or hub id, single files, adapters."""

from __future__ import annotations

from pathlib import Path

from flowmill.configs.errors import ConfigError
from flowmill.configs.path_types import looks_local
from flowmill.configs.registry import create
from flowmill.models.quickstart import BUILDERS
from flowmill.tasks.inputs.resolved import ResolvedConfig


def check_source(plan: ResolvedConfig) -> None:
    """Check that the start weights of a run exist and fit the configured model."""
    model, lora = plan.config.model, plan.config.model.lora
    build, path = model.build, model.path
    if build is not None:
        create(BUILDERS, build.name, build.options, label="model.build")
    if path is not None and looks_local(path) and not Path(path).is_dir():
        raise ConfigError(f"model.path '{path}' is no folder. Paths are relative to the config file.")
    if model.single_files:
        # Names and sizes of tensors are compared; nothing is converted.
        folder = Path(str(path)).expanduser()
        plan.family.check_single_files(model.single_files, folder if folder.is_dir() else None)
    if lora is not None and lora.start is not None:
        # Reading the start adapters checks them.
        _ = plan.lora
