"""Fields of a pipeline folder's scheduler and index that a family reads; all others must have their defaults.

Ignoring a config field would silently train another model. To add a scheduler, add a ``Fields`` to the family's table,
with every field of its class that is read or has no effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from flowmill.configs.errors import ConfigError
from flowmill.models.library_loading import diffusers_class, read_json, same
from flowmill.models.policies.pipeline_index import CLASSIC, read_index_file
from flowmill.models.weights.stored_weights import on_meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The supported fields of a class's config; all others must have the class's defaults."""

    followed: frozenset[str] = frozenset()
    """Fields that are read; any value is supported."""
    moot: frozenset[str] = frozenset()
    """Fields without effect: they configure the scheduler's own steps, which rollouts replace by their solver, or need
    another setting that is refused."""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Supported values of other fields, if not the default alone."""
    read_as: str | None = None
    """Class to create from the config instead; its fields also apply if the file has them."""


#: Fields that only have an effect with ``thresholding``, which is refused.
_THRESHOLD = {"dynamic_thresholding_ratio", "sample_max_value"}
#: The flow schedule, as the scheduler sets it.
FLOW = Fields(
    followed=frozenset(
        (
            "shift use_dynamic_shifting base_shift max_shift base_image_seq_len max_image_seq_len shift_terminal "
            "use_karras_sigmas use_exponential_sigmas use_beta_sigmas time_shift_type"
        ).split()
    )
)
#: The Euler grid of one shift, independent of the scheduler's own steps.
SHIFT_ALONE = Fields(
    followed=frozenset({"shift"}),
    moot=frozenset({"base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"}),
)
#: Fields of betas, which flow sigmas do not use.
_BETAS = {"beta_start", "beta_end", "beta_schedule", "trained_betas", "timestep_spacing", "steps_offset"}
_FLOWING: Mapping[str, tuple[Any, ...]] = {"prediction_type": ("flow_prediction",), "use_flow_sigmas": (True,)}
_UNIPC_STEPS = "solver_order solver_type solver_p predict_x0 lower_order_final disable_corrector".split()
UNIPC_FLOW = Fields(
    followed=frozenset({"flow_shift"}), moot=frozenset({*_THRESHOLD, *_BETAS, *_UNIPC_STEPS}), allowed=_FLOWING
)
#: Fields of a multistep DPM solver's steps, which rollouts do not use.
_DPM_STEPS = {
    *_THRESHOLD,
    *"solver_order algorithm_type solver_type lower_order_final euler_at_final lambda_min_clipped".split(),
}
DPM_FLOW = Fields(followed=frozenset({"flow_shift"}), moot=frozenset({*_DPM_STEPS, *_BETAS}), allowed=_FLOWING)
#: The training schedule, which DDIM follows for every scheduler in the folder.
_TRAINED = frozenset(
    "num_train_timesteps beta_start beta_end beta_schedule trained_betas steps_offset rescale_betas_zero_snr".split()
)
_PREDICTIONS = ("epsilon", "v_prediction", "sample")
_SPACINGS = ("leading", "trailing")
_AS_DDIM: Mapping[str, Any] = {
    "allowed": {"prediction_type": _PREDICTIONS, "timestep_spacing": _SPACINGS},
    "read_as": "DDIMScheduler",
}
DISCRETE: Mapping[str, Fields] = {
    "DDIMScheduler": Fields(
        followed=_TRAINED | {"set_alpha_to_one"},
        # StableDiffusionPipeline itself sets clip_sample to false.
        moot=frozenset({*_THRESHOLD, "clip_sample", "clip_sample_range"}),
        allowed={"prediction_type": _PREDICTIONS, "timestep_spacing": _SPACINGS},
    ),
    "PNDMScheduler": Fields(followed=_TRAINED | {"set_alpha_to_one"}, moot=frozenset({"skip_prk_steps"}), **_AS_DDIM),
    "EulerDiscreteScheduler": Fields(followed=_TRAINED, **_AS_DDIM),
    "DPMSolverMultistepScheduler": Fields(
        followed=_TRAINED,
        # The shift only has an effect with flow sigmas, which are refused.
        moot=frozenset({*_DPM_STEPS, "flow_shift"}),
        **_AS_DDIM,
    ),
}


@contextmanager
def whole(folder: Path) -> Iterator[None]:
    """Raise ConfigError inside the context if a file is missing, unreadable or has a value of another type."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {error}"
        raise ConfigError(
            f"model.path '{folder}' is not a whole pipeline: {reason}. Copy or download the folder again."
        ) from None


def read_index(
    folder: Path, pipeline: str, family: str, *, others: Collection[str] = (), name: str = CLASSIC
) -> dict[str, Any]:
    """Return the index of a folder, after checking that it is of the pipeline class or of an equivalent one; raise
    ConfigError if there is no index, or it is of another class. ``others``: classes with equivalent folders."""
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"model.path '{folder}' holds no {name}; it is not a diffusers pipeline folder.")
    with whole(folder):
        index = read_index_file(path)
    if index.get("_class_name") not in (pipeline, *others):
        raise ConfigError(
            f"model.path '{folder}' holds a {index.get('_class_name')}, but model.policy '{family}' needs a "
            f"{pipeline}. Choose the policy of that family, or another model."
        )
    return index


def _component(index: Mapping[str, Any], name: str) -> str | None:
    """Return the class of a component in a pipeline's index, or None; raise ValueError for a malformed entry."""
    entry = index.get(name)
    if entry is None:
        return None
    if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(each, str | None) for each in entry):
        raise ValueError(f"model_index.json says of '{name}' {entry!r}, not its library and class")
    return None if entry[1] is None else str(entry[1])


def component_class(index: Mapping[str, Any], name: str) -> type[nn.Module] | None:
    """Return the class of a component if it is a module of diffusers or transformers, else None; raise ValueError if
    the index's entry is malformed."""
    import transformers

    class_name = _component(index, name) if isinstance(index.get(name), list) else None
    library = {"transformers": transformers, "diffusers": diffusers_class("models")}.get(str(index[name][0]))
    kind = None if class_name is None else getattr(library, class_name, None)
    return kind if isinstance(kind, type) and issubclass(kind, nn.Module) else None


def check_scheduler(
    folder: Path, family: str, index: Mapping[str, Any], supported: Mapping[str, Fields], *, part: str = "scheduler"
) -> None:
    """Check that the family supports a folder's scheduler and all of its settings; raise ConfigError if its class is
    not supported, an unread field differs from its default, or there is no config. ``supported``: fields read by the
    family, by scheduler class; ``part``: the component, for pipelines with several schedulers."""
    name = _component(index, part)
    if name is None or name not in supported:
        raise ConfigError(
            f"model.path '{folder}' has the {part} {name}, whose schedule '{family}' cannot follow: "
            f"log-probs need steps of known noise. Save the pipeline with {' or '.join(supported)}."
        )
    path = folder / part / "scheduler_config.json"
    if not path.is_file():
        raise ConfigError(f"model.path '{folder}' has no {part}/scheduler_config.json. Copy or download it again.")
    config = read_json(path)
    for key, value, allowed in _unread(config, settings_of(name), supported[name]):
        raise ConfigError(
            f"model.path '{folder}': {key} of its {part} {name} is {value!r}, which '{family}' does not follow: it "
            f"would draw and train as if it were {' or '.join(repr(each) for each in allowed)}, unlike the model's "
            f"training. Take a model, or save this pipeline with a scheduler, whose {key} is that."
        )
    scheduler_of(folder, index, part=part)


def scheduler_of(folder: Path, index: Mapping[str, Any], *, part: str = "scheduler") -> Any:
    """Return the scheduler of a pipeline folder; raise ConfigError if diffusers cannot create it from its config."""
    name = str(_component(index, part))
    try:
        return diffusers_class(name).from_config(read_json(folder / part / "scheduler_config.json"))
    except (ArithmeticError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.path '{folder}': diffusers can make no {name} of {part}/scheduler_config.json: {error}. "
            "Correct the file, or copy or download it again."
        ) from None


def check_velocities(folder: Path, field: str) -> None:
    """Check that a transformer is no flow map, which takes the end of a step as an input; raise ConfigError.

    Args:
        folder: the pipeline's folder.
        field: the field of the transformer's config that makes it one.
    """
    if read_json(folder / "transformer" / "config.json").get(field):
        raise ConfigError(
            f"model.path '{folder}' is distilled ({field} in transformer/config.json): its predictions are those of "
            "whole steps, which have no log-probs. Take the base model it was distilled from."
        )


def check_guider(folder: Path, family: str, index: Mapping[str, Any]) -> None:
    """Check that a folder's guider computes the same guidance as the family, at any scale; raise ConfigError."""
    kind, config = index["guider"][1], read_json(folder / "guider" / "guider_config.json")
    if kind != "ClassifierFreeGuidance":
        raise ConfigError(
            f"model.path '{folder}' has the guider {kind}, but model.policy '{family}' guides as "
            "ClassifierFreeGuidance does. Save the pipeline with that."
        )
    for key, default in settings_of(kind).items():
        if key != "guidance_scale" and config.get(key, default) != default:
            raise ConfigError(
                f"model.path '{folder}': {key} of its guider {kind} is {config[key]!r}, which '{family}' does "
                f"not follow; it knows {default!r}. Save this pipeline with a guider whose {key} is that."
            )


def check_index(
    folder: Path, family: str, index: Mapping[str, Any], defaults: Mapping[str, Any], fields: Fields, *, name: str
) -> None:
    """Check that the family supports the settings in a pipeline's index; raise ConfigError if an unread setting differs
    from its default."""
    settings = {key: value for key, value in index.items() if not isinstance(value, list)}
    for key, value, allowed in _unread(settings, defaults, fields):
        raise ConfigError(
            f"model.path '{folder}': {key} in its {name} is {value!r}, which '{family}' does not follow; it "
            f"knows {' or '.join(repr(each) for each in allowed)}. Choose another model or family."
        )


def described(folder: Path, class_name: str) -> nn.Module:
    """Return a component on the meta device, created from its config."""
    return on_meta(partial(diffusers_class(class_name).from_config, read_json(folder / "config.json")))


def settings_of(name: str) -> dict[str, Any]:
    """Return the defaults of a diffusers class's config fields, for the fields that have one."""
    parameters = inspect.signature(diffusers_class(name).__init__).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def _unread(
    config: Mapping[str, Any], own: Mapping[str, Any], fields: Fields
) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield every unread field with an unsupported value: its name, value, and the supported values."""
    defaults, converted = dict(own), fields.read_as is not None
    if fields.read_as is not None:
        others = settings_of(fields.read_as)
        table = DISCRETE[fields.read_as]
        defaults |= {key: value for key, value in others.items() if key in config and key not in defaults}
        fields = Fields(
            followed=fields.followed, moot=fields.moot | table.moot | table.followed, allowed=fields.allowed
        )
    for key, default in defaults.items():
        # A field missing from the file has the default of the read_as class.
        if key in fields.followed or key in fields.moot or (converted and key not in config):
            continue
        value, allowed = config.get(key, default), fields.allowed.get(key, (default,))
        if not any(same(value, each) for each in allowed):
            yield key, value, allowed
