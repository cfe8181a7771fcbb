"""Checks of model settings against the family: start images, clip sizes, guidance, attention, precision."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from flowmill.configs.errors import ConfigError, PromptError
from flowmill.configs.model_families import families
from flowmill.configs.path_types import looks_local
from flowmill.configs.registry import create, resolve
from flowmill.configs.suggestions import did_you_mean
from flowmill.configs.user_directories import user_path
from flowmill.models.films import is_film
from flowmill.models.library_loading import read_json
from flowmill.models.memory.architectures import architecture_of
from flowmill.models.policies import POLICIES
from flowmill.models.policies.attention import FIXED, MASKED, wrong_device
from flowmill.models.policies.ddim import DDIMPolicy
from flowmill.models.policies.pipeline import PipelinePolicy
from flowmill.models.policies.pipeline_configs import whole
from flowmill.models.quickstart import BUILDERS
from flowmill.tasks.inputs.clip_settings import check_clips
from flowmill.tasks.inputs.guidance_settings import check_guidance
from flowmill.tasks.inputs.prompt_rows import readable
from flowmill.tasks.inputs.prompts import Prompt
from flowmill.tasks.inputs.quantize_settings import check_quantize
from flowmill.tasks.inputs.resolved import ResolvedConfig

#: Width of a token in latents, in the models that builders make.
_BUILT_PATCH = 2
#: Families whose activations leave float16's range, so that images are black (github.com/Tongyi-MAI/Z-Image/issues/14).
_OVERFLOWING = frozenset({"z_image"})


def check_model(plan: ResolvedConfig) -> None:
    """Check the source of the model and its call options."""
    _check_source(plan)
    if plan.family_spec.references is not None:
        _check_references(plan)
    _check_images(plan)
    if plan.config.model.policy not in POLICIES:
        return
    check_clips(plan)
    _check_base(plan)
    _check_size(plan)
    _check_evaluated(plan)
    _check_text_limit(plan)
    _check_steps(plan)
    check_guidance(plan)
    _check_attention(plan)
    check_quantize(plan)
    _check_precision(plan)


def _check_source(plan: ResolvedConfig) -> None:
    """Check that the start weights of a run exist and fit the configured model."""
    model, lora = plan.config.model, plan.config.model.lora
    build, path = model.build, model.path
    if build is not None:
        create(BUILDERS, build.name, build.options, label="model.build")
    if path is not None and looks_local(path) and not Path(path).is_dir():
        raise ConfigError(f"model.path '{path}' is no folder. Paths are relative to the config file.")
    if model.single_files:
        # Names and sizes of tensors are compared; nothing is converted.
        folder = user_path(str(path))
        plan.family.check_single_files(model.single_files, folder if folder.is_dir() else None)
    if lora is not None and lora.start is not None:
        # Reading the start adapters checks them.
        _ = plan.lora


def _check_base(plan: ResolvedConfig) -> None:
    """Run the checks of loading the base model without loading it: class, files, size and schedule."""
    config, model, family = plan.config, plan.config.model, plan.family
    if not issubclass(family, PipelinePolicy):
        return
    options = plan.model_options
    settings = family.settings_for(config, dtype=torch.float32, device=torch.device("cpu"), empty=False)
    if model.build is not None:
        builder = create(BUILDERS, model.build.name, model.build.options, label="model.build")
        _check_built(family, getattr(builder, "family", None))
        shape = builder.latents
        family.check_size(None, settings, unit=None if shape is None else shape[1] * _BUILT_PATCH)
        return
    folder = user_path(str(model.path))
    if folder.is_dir():
        family.check_folder(folder, settings)
        family.check_options(folder, options)
        family.check_weights(folder)
    else:
        family.check_size(None, settings)


def _check_built(family: type[PipelinePolicy], built: str | None) -> None:
    pipeline = None if built is None else resolve(POLICIES, built, label="model.build.options.family").pipeline_name
    if pipeline is not None and pipeline != family.pipeline_name:
        raise ConfigError(
            f"model.build makes a {pipeline}, of the family '{built}', but model.policy '{family.family}' needs a "
            f"{family.pipeline_name}. Set both to the same family."
        )


def _check_references(plan: ResolvedConfig) -> None:
    # Creating the options checks the number of images.
    references, options = plan.model_options.references, plan.config.model.options
    if not references and "reference_area" in options:
        raise ConfigError(
            f"model.options.reference_area is {options['reference_area']}, but model.options.references is 0, so there "
            "are no images to scale. Set references to the most images a prompt comes with, or remove reference_area."
        )


def _check_images(plan: ResolvedConfig) -> None:
    config = plan.config
    if config.data is not None and not config.prompts.lists("heldout"):
        # All prompts are those of the rows, see ``check_data``.
        return
    family, has_images = config.model.policy, config.prompts.image is not None
    takes = bool(plan.most_images)
    if not takes and plan.family_spec.references is not None and has_images:
        raise ConfigError(
            f"prompts.image is '{config.prompts.image}', but model.options.references of model.policy '{family}' is 0, "
            "so it starts from noise alone. Set model.options.references to the most images a prompt comes with, or "
            "remove prompts.image."
        )
    if takes and not has_images and config.render is None:
        raise ConfigError(
            f"model.policy '{family}' starts from images, but prompts.image is not set. "
            "Name the column with their paths."
        )
    drawer = None if config.render is None else plan.drawer.config
    if has_images and not takes and (drawer is None or drawer.prompts.image is None):
        named = f"model.policy '{family}' takes"
        if drawer is not None:
            named = f"neither model.policy '{family}' nor render.model.policy '{drawer.model.policy}' takes"
        raise ConfigError(
            f"prompts.image is '{config.prompts.image}', but {named} no image. Remove it, or "
            f"choose one of {', '.join(families(lambda spec: spec.starts_from != 'text'))}."
        )


def check_reference_images(plan: ResolvedConfig, prompts: Sequence[Prompt]) -> None:
    """Check that no prompt has more images than the model takes, or a film where the model takes images only."""
    config, spec, most = plan.config, plan.family_spec, plan.most_images
    family = config.model.policy
    if not most:
        return
    folder, frames = user_path(str(config.model.path)), config.model.frames
    columns = {
        "prompts.image": config.prompts.image,
        "data.columns.prompt_image": config.data and config.data.prompt_image,
    }
    column = " or ".join(name for name, value in columns.items() if value) or "prompts.image"
    ends = plan.family.check_ends if spec.last_frame else None
    for prompt in prompts:
        films = [each for each in prompt.images if spec.starts_from != "clip" and is_film(readable(each))]
        if films:
            name = "an image column" if isinstance(films[0], bytes) else films[0].name
            raise PromptError(
                f"{column}: prompt {prompt.text!r} comes with the film "
                f"'{name}', but model.policy '{family}' starts from an image. Name an image, or choose one of "
                f"{', '.join(families(lambda spec: spec.starts_from == 'clip'))}."
            )
        if len(prompt.images) > most:
            remedy = "Raise model.options.references" if spec.references is not None else "Name one of them"
            remedy = "Name the first and the last frame" if spec.last_frame else remedy
            remedy = "Raise model.options.images" if spec.images is not None else remedy
            raise PromptError(
                f"{column}: prompt {prompt.text!r} comes with {len(prompt.images)} "
                f"images, but model.policy '{family}' takes {most} as it is set. {remedy}, or choose a model for "
                f"several ({', '.join(families(lambda spec: spec.references is not None))})."
            )
        if ends is not None and folder.is_dir():
            ends(folder, len(prompt.images), prompt.text, frames)


def _check_size(plan: ResolvedConfig) -> None:
    """Check that a model of known architecture has positions for an image of the configured size."""
    model = plan.config.model
    with whole(user_path(str(model.path))):
        most = _positions(plan)
    for name, size in (("height", model.height), ("width", model.width)):
        if most is not None and size > most:
            raise ConfigError(
                f"model.{name} is {size}, but '{model.path}' has positions for {most} pixels at most. Set it to {most} "
                "or less."
            )


def _positions(plan: ResolvedConfig) -> int | None:
    """Return the largest image side, in pixels, that a model has positions for; None if unlimited or unknown."""
    model = plan.config.model
    network = None if model.path is None else architecture_of(model.path)
    if network is not None:
        return int(network.config.get("pos_embed_max_size", 0)) * network.patch * network.latents[1] or None
    config = user_path(str(model.path)) / "transformer" / "config.json"
    most = read_json(config).get("pos_embed_max_size") if config.is_file() else None
    return None if most is None else int(most) * int(plan.family.unit_of(config.parent.parent))


def _check_evaluated(plan: ResolvedConfig) -> None:
    """Check the size of evaluations where it differs from that of rollouts."""
    evaluated, model = plan.evaluated, plan.config.model
    if evaluated is plan:
        return
    if plan.most_images:
        raise ConfigError(
            f"evaluate: height, width and frames are set, but prompts of model.policy '{model.policy}' come with "
            "images, which are encoded in the size of rollouts alone. Remove them."
        )
    if evaluated.config.model.makes_clips != model.makes_clips:
        raise ConfigError(
            f"evaluate.frames is {evaluated.config.model.frames} and model.frames is {model.frames}: one makes images "
            "and the other clips, which rewards and stores tell apart. Set both to 1, or both to more."
        )
    try:
        check_clips(evaluated)
        _check_base(evaluated)
        _check_size(evaluated)
    except ConfigError as error:
        # These messages name the settings of ``model``.
        message = re.sub(r"\bmodel\.(height|width|frames)\b", r"evaluate.\1", str(error))
        raise ConfigError(message) from None


def _check_text_limit(plan: ResolvedConfig) -> None:
    most, length = plan.family_spec.text_limit, getattr(plan.model_options, "max_sequence_length", 0)
    if most is not None and length > most:
        raise ConfigError(
            f"model.options.max_sequence_length is {length}, but the pipeline of model.policy "
            f"'{plan.config.model.policy}' takes {most} at most, so an export could not be called. Set it to {most}."
        )


def _check_steps(plan: ResolvedConfig) -> None:
    """Check the number of steps of families whose noise schedule is divided into, or built for, a fixed number."""
    config, family = plan.config, plan.config.model.policy
    whole, default = plan.family_spec.steps_divide, plan.family_spec.steps
    for where, steps in (("rollout.steps", config.rollout.steps), ("evaluate.steps", config.evaluate.steps)):
        if whole is not None and steps is not None and whole % steps:
            raise ConfigError(
                f"{where} is {steps}, but the steps of model.policy '{family}' lead from one of its {whole} timesteps "
                f"to the next only where {whole} is a multiple of their number. The nearest are "
                f"{_divisors(whole, steps)}."
            )
    _check_chain(plan)
    if default is None:
        return
    fixed = config.model.options.get("steps", default)
    # Samples of data begin with no noise: there the steps are the levels of training alone.
    sampled = config.rollout.steps if config.data is None else None
    for where, steps in (("rollout.steps", sampled), ("evaluate.steps", config.evaluate.steps or config.rollout.steps)):
        if steps is not None and steps != fixed:
            raise ConfigError(
                f"{where} is {steps}, but model.options.steps of model.policy '{family}' is {fixed}, which fixes the "
                f"noise a sample begins with. Set model.options.steps and {where} to the same number."
            )


def _check_chain(plan: ResolvedConfig) -> None:
    """Check that the scheduler of a local folder has levels for every number of steps."""
    config, family, folder = plan.config, plan.family, Path(str(plan.config.model.path))
    if issubclass(family, DDIMPolicy) and user_path(folder).is_dir():
        for steps in (config.rollout.steps, config.evaluate.steps or config.rollout.steps):
            family.noise_range(user_path(folder), steps)


def _divisors(whole: int, near: int) -> str:
    divisors = [each for each in range(1, whole + 1) if whole % each == 0]
    below, above = [n for n in divisors if n < near][-1:], [n for n in divisors if n > near][:1]
    return " and ".join(map(str, below + above))


def _check_attention(plan: ResolvedConfig) -> None:
    model, name = plan.config.model, plan.config.model.attention
    if name is None:
        return
    table = plan.family.attentions
    if name not in table:
        raise ConfigError(f"model.attention '{name}' does not exist. {did_you_mean(name, table)}")
    backend, reason = table[name], None
    if model.policy in FIXED and name != "native":
        reason = f"model.policy '{model.policy}' calls torch's attention directly, so it would never be used"
    elif not backend.trains:
        reason = "it has no backward pass, so queries, keys and values would silently stay untrained"
    elif backend.half and model.dtype == "float32":
        reason = "it computes in bfloat16 and float16 only, and model.dtype is 'float32'"
    elif name == "aiter_fa2_hub" and model.dtype == "float16":
        reason = "it computes in bfloat16 only, and model.dtype is 'float16'"
    elif not backend.masks and model.policy in MASKED:
        reason = f"it takes no mask, and the padded text of model.policy '{model.policy}' needs one"
    # A config with devices of another machine may be checked here; those of 'auto' are known when a model is loaded.
    elif plan.config.execution.device != "auto":
        reason = wrong_device(backend, plan.config.execution.device)
    if reason is not None:
        raise ConfigError(f"model.attention is '{name}', but {reason}. Set it to '{next(iter(table))}' or remove it.")


def _check_precision(plan: ResolvedConfig) -> None:
    model = plan.config.model
    if model.dtype == "float16" and model.policy in _OVERFLOWING:
        raise ConfigError(
            f"model.dtype is 'float16', but activations of model.policy '{model.policy}' exceed its range, so that "
            "latents become NaN. Set it to 'bfloat16'."
        )
