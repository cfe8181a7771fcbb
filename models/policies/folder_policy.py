"""Families whose models are diffusers folders: loading their parts, after checking the folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import build
from flowmill.models.library_loading import diffusers_class, quiet_libraries, read_json
from flowmill.models.policies.decoding import DecodingPolicy
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline_configs import (
    FLOW,
    Fields,
    check_index,
    check_scheduler,
    component_class,
    described,
    read_index,
    settings_of,
    whole,
)
from flowmill.models.policies.pipeline_index import CLASSIC
from flowmill.models.policies.single_files import components_in, load_components, write_folder
from flowmill.models.weights.complete import check_complete
from flowmill.models.weights.pretrained_loading import check_model_folder, check_own_code, load_pretrained
from flowmill.models.weights.quantized import quantization_config
from flowmill.models.weights.stored_weights import (
    StoredWeights,
    check_safetensors,
    check_variants,
    empty_model,
    on_meta,
)


class FolderPolicy(DecodingPolicy):
    """Loads folders of one diffusers pipeline class."""

    pipeline_name: ClassVar[str]
    """The diffusers class whose folders this family loads."""
    index_name: ClassVar[str] = CLASSIC
    """The index file of a folder, which lists its components."""
    folders_of: ClassVar[tuple[str, ...]] = ()
    """Other pipeline classes whose folders it loads."""
    family: ClassVar[str]
    """Name in the table, for messages."""
    options_type: ClassVar[type[Any]]
    """Dataclass of ``model.options``."""
    text_parts: ClassVar[tuple[str, ...]]
    """Components that only encode prompts."""
    unused_parts: ClassVar[tuple[str, ...]] = ()
    denoiser_names: ClassVar[tuple[str, ...]] = ("transformer",)
    """Trained components; those missing from a folder are left out."""
    schedulers: ClassVar[Mapping[str, Fields]] = {"FlowMatchEulerDiscreteScheduler": FLOW}
    """Supported scheduler classes, and the fields read from their configs."""
    settings_read: ClassVar[Fields] = Fields()
    """Fields read from the index's settings, which it has besides components."""
    measured_names: ClassVar[tuple[str, ...]] = ("vae",)
    """Autoencoders whose configs give the size of latents."""
    needs_autoencoder: ClassVar[bool] = False
    """Creating the pipeline needs an autoencoder's config, even to encode prompts only."""
    size_unit: ClassVar[int] = 16
    """Height and width must be multiples of it, unless the folder's config gives another unit."""

    def __init__(self, pipeline: Any, settings: DiffusionSettings, options: Any) -> None:
        super().__init__(pipeline, settings)
        self.options = options

    @classmethod
    def load(
        cls, folder: Path, settings: DiffusionSettings, parts: frozenset[Part], options: Mapping[str, Any]
    ) -> Self:
        quiet_libraries()
        chosen = build(cls.options_type, cls.family, options, label="model.options of")
        index = cls.check_folder(folder, settings)
        cls.check_options(folder, chosen)
        cls.check_weights(folder)
        has = [name for name in (*cls.text_parts, *cls.denoiser_names) if index.get(name, [None])[0]]
        absent: dict[str, Any] = {name: None for name in (*cls.text_parts, *cls.unused_parts) if name not in has}
        absent |= {} if Part.TEXT in parts else dict.fromkeys(cls.text_parts)
        absent |= {} if Part.DENOISER in parts and not settings.empty else dict.fromkeys(cls.denoiser_names)
        # Without autoencoders, their configs give the size of latents; pipelines read it when they are created.
        unloaded = Part.VAE not in parts and (Part.DENOISER in parts or cls.needs_autoencoder)
        shapes = {name: described(folder / name, index[name][1]) for name in cls.measured_names if unloaded}
        absent |= {} if Part.VAE in parts else {**dict.fromkeys(cls.decoder_names), **shapes}
        components: dict[str, Any] = {**absent, **cls.components(folder, parts)}
        check_safetensors(folder, [name for name in index if name not in components])
        pipeline = cls.assembled(folder, settings, components)
        pipeline.set_progress_bar_config(disable=True)
        for name in shapes:
            setattr(pipeline, name, None)
        pipeline.to(settings.device)
        for name in shapes if Part.DENOISER in parts else ():
            setattr(pipeline, name, shapes[name])
        if not shapes and pipeline.vae is not None and settings.vae_tiling:
            pipeline.vae.enable_tiling()
        for name in cls.denoiser_names:
            if name in has and getattr(pipeline, name) is None:
                module_class, config = diffusers_class(index[name][1]), read_json(folder / name / "config.json")
                make = partial(module_class.from_config, config)
                # To encode prompts only, just the widths in its config are needed.
                setattr(pipeline, name, empty_model(make, settings.dtype) if Part.DENOISER in parts else on_meta(make))
        policy = cls(pipeline, settings, chosen)
        if Part.DENOISER in parts:
            policy.stored = {name: StoredWeights.of(folder / name, module) for name, module in policy.denoisers.items()}
        return policy

    @classmethod
    def assembled(cls, folder: Path, settings: DiffusionSettings, components: Mapping[str, Any]) -> Any:
        """Return the pipeline of a folder; provided components replace those of the folder."""
        # Decoding is a small part of the work, and its rounding affects rewards.
        kinds = {"default": settings.dtype, **dict.fromkeys(cls.decoder_names, torch.float32)}
        loading: dict[str, Any] = {"dtype": kinds, "use_safetensors": True}
        quantized = cls.quantization(folder, settings)
        if quantized:
            from diffusers import PipelineQuantizationConfig

            loading["quantization_config"] = PipelineQuantizationConfig(quant_mapping=quantized)
        return load_pretrained(diffusers_class(cls.pipeline_name), folder, label="model.path", **loading, **components)

    @classmethod
    def quantization(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        """Return the configs that quantize denoisers and text encoders while they are loaded, by component."""
        section, index = settings.quantize, cls._index_of(folder)
        if section is None:
            return {}
        requested = ((cls.denoiser_names, section.name), (cls.text_parts, section.text_encoders))
        kinds = {(part, name): component_class(index, part) for parts, name in requested if name for part in parts}
        return {
            part: quantization_config(name, kind.__module__.split(".")[0], settings.dtype, settings.device)
            for (part, name), kind in kinds.items()
            if kind is not None
        }

    @property
    def denoisers(self) -> dict[str, Any]:
        modules = {name: getattr(self.pipeline, name, None) for name in self.denoiser_names}
        return {name: module for name, module in modules.items() if module is not None}

    @classmethod
    def missing_parts(cls, folder: Path) -> tuple[str, ...]:
        """Return missing text components for which the pipeline's class has no default."""
        index = cls._index_of(folder)
        optional = diffusers_class(cls.pipeline_name)._optional_components
        absent = (name for name in cls.text_parts if not index.get(name, [None])[0])
        return tuple(name for name in absent if name not in optional)

    @classmethod
    def check_single_files(cls, files: Mapping[str, str], folder: Path | None) -> frozenset[str]:
        if folder is None:
            return components_in(files, cls.denoiser_names[0])
        index = {name: entry for name, entry in cls._index_of(folder).items() if name not in cls.unused_parts}
        return frozenset(name for name, _ in load_components(files, folder, index, cls.denoiser_names))

    @classmethod
    def write_single_files(cls, files: Mapping[str, str], folder: Path, target: Path) -> None:
        write_folder(files, folder, cls._index_of(folder), cls.denoiser_names, target)

    @classmethod
    def _index_of(cls, folder: Path) -> dict[str, Any]:
        return read_index(folder, cls.pipeline_name, cls.family, others=cls.folders_of, name=cls.index_name)

    @classmethod
    def check_folder(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        """Check that a folder fits the family and the sample size, and has no unknown settings; return its index."""
        index = cls._index_of(folder)
        check_model_folder(folder, label="model.path")
        check_own_code(folder, index, label="model.path")
        with whole(folder):
            check_variants(folder, [name for name in index if name not in cls.unused_parts])
            cls.check_size(folder, settings)
            cls._check_scheduler(folder, index)
            defaults = cls.setting_defaults()
            check_index(folder, cls.family, index, defaults, cls.settings_read, name=cls.index_name)
        return index

    @classmethod
    def check_weights(cls, folder: Path) -> None:
        """Check that a folder, already checked by ``check_folder``, has all weights of its components."""
        index = cls._index_of(folder)
        with whole(folder):
            for name in (name for name in index if name not in cls.unused_parts and (folder / name).is_dir()):
                kind = component_class(index, name)
                if kind is not None:
                    check_complete(folder / name, kind, label="model.path")

    @classmethod
    def trained_on_meta(cls, folder: Path, *, critic: bool = False) -> Mapping[str, Any]:
        index = cls._index_of(folder)
        kinds = {name: index.get(name, [None, None])[1] for name in cls.denoiser_names}
        return {name: described(folder / name, kind) for name, kind in kinds.items() if kind and not critic}

    @classmethod
    def setting_defaults(cls) -> Mapping[str, Any]:
        """Return the defaults of the pipeline's settings, which its index has besides components."""
        return settings_of(cls.pipeline_name)

    @classmethod
    def check_options(cls, folder: Path, options: Any) -> None:
        """Check that a folder, already checked by ``check_folder``, supports the options; raise ConfigError."""

    @classmethod
    def check_size(cls, folder: Path | None, settings: DiffusionSettings, *, unit: int | None = None) -> None:
        """Check that height and width are multiples of ``unit``, by default the unit of the folder or family. Raises
        ConfigError if they are not; the message names the nearest sizes."""
        unit = unit or (cls.size_unit if folder is None else cls.unit_of(folder))
        for name in ("height", "width"):
            size = getattr(settings, name)
            if size % unit or size < unit:
                below = max(unit, size // unit * unit)
                raise ConfigError(
                    f"model.{name} is {size}, but this model takes multiples of {unit}. "
                    f"The nearest are {below} and {below + unit}."
                )
        if settings.frames != 1:
            raise ConfigError(f"model.frames is {settings.frames}, but '{cls.family}' makes images. Set it to 1.")

    @classmethod
    def components(cls, folder: Path, parts: frozenset[Part]) -> Mapping[str, Any]:
        """Return components that the pipeline's own loader cannot load."""
        return {}

    @classmethod
    def unit_of(cls, folder: Path) -> int:
        """Return the unit of height and width."""
        return cls.size_unit

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        check_scheduler(folder, cls.family, index, cls.schedulers)
