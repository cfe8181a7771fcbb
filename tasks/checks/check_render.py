"""Refuses an image model that cannot draw texts, or whose images no reward reads."""

from __future__ import annotations

from configs.errors import ConfigError
from configs.execution import ExecutionSection
from configs.model import ModelSection
from configs.schema import RunConfig
from models.policies import IMAGE_CONDITIONED
from tasks.inputs.components import make_solver
from tasks.inputs.model_settings import check_model
from tasks.inputs.renderer import reads_images, render_of, renderer_config
from tasks.modalities.modality import make_kind

#: Execution settings of the image model, which have no effect without one.
_OF_EXECUTION = ("render_rows", "render_device", "keep_renderer")
#: Model settings that apply to training or clips only.
_FOREIGN = ("lora", "checkpoint", "start", "start_config", "gradient_checkpointing", "frames")


def check_render(config: RunConfig) -> None:
    """Check the section ``render``; without one, check that no setting depends on it.

    Raises:
        ConfigError: a setting cannot work, or has no effect.
    """
    if config.render is None:
        _check_absent(config)
        return
    policy = config.model.policy
    if not make_kind(config).writes:
        raise ConfigError(
            f"render draws texts, but model.policy '{policy}' writes none. Remove it, or train a model that does, such "
            "as causal_lm."
        )
    _check_drawer(config)
    if not any(reads_images(config, section) for section in (*config.scored, *config.evaluate.judges)):
        raise ConfigError(
            "render draws images, but every reward, monitor and judge has reads 'texts', so nothing looks at them. "
            "Remove render, or one reward's 'reads'."
        )


def _check_drawer(config: RunConfig) -> None:
    """Check the image model as the model of a run."""
    drawer, model = renderer_config(config), render_of(config).model
    if not make_kind(drawer).draws:
        raise ConfigError(
            f"render.model.policy '{model.policy}' cannot draw texts. Choose a family of image models, such as sd3."
        )
    for name in _FOREIGN:
        value = getattr(model, name)
        if value != ModelSection.model_fields[name].default:
            raise ConfigError(
                f"render.model.{name} is set, but that model is never trained and draws images. Remove it; a model "
                "that was trained before is one by its exported folder, in render.model.path."
            )
    if model.policy in IMAGE_CONDITIONED:
        raise ConfigError(
            f"render.model.policy '{model.policy}' starts from images, but there are only texts. Choose another."
        )
    make_solver(render_of(config).solver, "render.solver")
    try:
        check_model(drawer)
    except ConfigError as error:
        raise ConfigError(f"render: {error}") from None


def _check_absent(config: RunConfig) -> None:
    for section in (*config.scored, *config.evaluate.judges):
        if section.reads is not None:
            raise ConfigError(
                f"rewards: '{section.slot}' has reads '{section.reads}', which chooses between texts and images drawn "
                "of them, but the config has no section 'render'. Remove it."
            )
    for name in _OF_EXECUTION:
        if getattr(config.execution, name) != ExecutionSection.model_fields[name].default:
            raise ConfigError(
                f"execution.{name} is set, but the config has no section 'render', so it would do nothing. Remove it."
            )
