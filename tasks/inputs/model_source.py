"""Checks of the start weights of a run: a builder, a folder or hub id, single files, adapters."""

from __future__ import annotations

from pathlib import Path

from flowmill.configs.errors import ConfigError
from flowmill.configs.model import ModelSection
from flowmill.configs.path_types import looks_local
from flowmill.configs.registry import create, resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.policies import POLICIES
from flowmill.models.quickstart import BUILDERS
from flowmill.tasks.inputs.components import lora_spec


def check_source(config: RunConfig) -> None:
    """Check that the start weights of a run exist and fit the configured model."""
    build, path = config.model.build, config.model.path
    if build is not None:
        create(BUILDERS, build.name, build.options, label="model.build")
    if path is not None and looks_local(path) and not Path(path).is_dir():
        raise ConfigError(f"model.path '{path}' is no folder. Paths are relative to the config file.")
    _check_single_files(config.model)
    _check_start(config)


def _check_single_files(model: ModelSection) -> None:
    """Check by names and sizes of tensors that single files hold their component; they are not converted."""
    if model.single_files:
        folder, family = Path(str(model.path)).expanduser(), resolve(POLICIES, model.policy, label="model.policy")
        family.check_single_files(model.single_files, folder if folder.is_dir() else None)


def _check_start(config: RunConfig) -> None:
    """Check that start adapters exist and agree with the config."""
    lora = config.model.lora
    if lora is None or lora.start is None:
        return
    lora_spec(config, resolve(POLICIES, config.model.policy, label="model.policy"))
