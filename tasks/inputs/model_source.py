"""Checks of the start weights of a run: a builder, a folder or hub id, single files, a checkpoint, adapters."""

from __future__ import annotations

from pathlib import Path

from configs.errors import ConfigError
from configs.model import ModelSection
from configs.path_types import looks_local
from configs.registry import create, resolve
from configs.schema import RunConfig
from models.policies import POLICIES
from models.quickstart import BUILDERS
from tasks.inputs.components import lora_spec


def check_source(config: RunConfig) -> None:
    """Check that the start weights of a run exist and fit the configured model."""
    build, path = config.model.build, config.model.path
    if build is not None:
        create(BUILDERS, build.name, build.options, label="model.build")
    if path is not None and looks_local(path) and not Path(path).is_dir():
        raise ConfigError(f"model.path '{path}' is no folder. Paths are relative to the config file.")
    _check_single_files(config.model)
    if config.model.checkpoint is not None:
        from models.weights.dcp_checkpoints import DcpCheckpoint

        DcpCheckpoint(Path(config.model.checkpoint))
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
    if config.model.checkpoint is not None:
        raise ConfigError(
            "model.lora.start: training would begin with these adapters and with those of model.checkpoint. Leave one "
            "of the two out."
        )
    lora_spec(config, resolve(POLICIES, config.model.policy, label="model.policy"))
