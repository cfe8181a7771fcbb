"""Checks of trained weights and teachers from configs and file headers: adapters, teacher folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flowmill.configs.errors import ConfigError
from flowmill.configs.path_types import looks_local
from flowmill.configs.user_directories import user_path
from flowmill.models.policies.folder_policy import FolderPolicy
from flowmill.models.weights.lora import LoraSpec, add_lora
from flowmill.models.weights.quantized import check_stored_whole
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.inputs.weight_sources import critic_folder


def check_trained(plan: ResolvedConfig) -> None:
    """Check that the trained weights can be created: adapters fit the model's layers, and start weights fit both.

    Applies to local folders only; a hub model is checked once it is downloaded.
    """
    config, family = plan.config, plan.family
    folder = user_path(str(config.model.path))
    if config.model.path is None or config.model.single_files or not folder.is_dir():
        return
    lora, trained = plan.lora, family.trained_on_meta(folder)
    if lora is None:
        check_stored_whole(folder, trained, label="model.path")
    shapes = _trained_shapes(trained, lora)
    start = None if config.model.lora is None else config.model.lora.start
    if shapes and start is not None:
        family.read_adapter(start).weights(shapes)
    if plan.requires.critic and config.critic.backbone == "own":
        own = folder if config.critic.path is None else critic_folder(config.critic.path)
        valued = family.trained_on_meta(own, critic=True)
        if lora is None:
            check_stored_whole(own, valued, label="critic.path")
        _trained_shapes(valued, lora)


def check_teachers(plan: ResolvedConfig) -> None:
    """Check the folders of an algorithm's teachers like the folder of the base model."""
    for name, path in plan.requires.teachers:
        folder, option = user_path(path), f"teachers.{name}" if name else "teacher"
        if not folder.is_dir() and looks_local(path):
            raise ConfigError(
                f"optimize.algorithm.options.{option} '{path}' is no folder. Paths are relative to the config file."
            )
        if folder.is_dir() and issubclass(plan.family, FolderPolicy):
            _check_teacher(plan, folder, option)


def _check_teacher(plan: ResolvedConfig, folder: Path, option: str) -> None:
    family: type[FolderPolicy] = plan.family
    settings = family.settings_for(plan.config, dtype=torch.float32, device=torch.device("cpu"), empty=False)
    try:
        family.check_folder(folder, settings)
        family.check_weights(folder)
    except ConfigError as error:
        raise ConfigError(f"optimize.algorithm.options.{option}, a model like that of model.path: {error}") from None


def _trained_shapes(modules: Mapping[str, Any], lora: LoraSpec | None) -> dict[str, torch.Size]:
    """Return the shapes of the trained parameters of modules on the meta device, by name."""
    for name, module in modules.items():
        if lora is not None:
            # On the meta device the initial weights of adapters are not computed.
            with torch.device("meta"):
                add_lora(name, module, lora, seed=0)
    return {
        f"{name}.{key}": parameter.shape
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
        if lora is None or parameter.requires_grad
    }
