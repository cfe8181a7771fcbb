"""Families whose pipelines are modular: blocks of diffusers' ``modular_pipelines`` over components.

A family names its blocks and those to leave out; otherwise its policy works like those of classic pipelines.
Components are created by the classes that the blocks expect, even if a repository names others. The policy applies
guidance itself; the guider only passes its scale to the plain pipeline.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from flowmill.configs.errors import ConfigError
from flowmill.models.library_loading import diffusers_class
from flowmill.models.policies.diffusion import DiffusionSettings, PipelineCall
from flowmill.models.policies.pipeline import PipelinePolicy
from flowmill.models.policies.pipeline_configs import check_guider
from flowmill.models.policies.pipeline_index import MODULAR
from flowmill.models.weights.pretrained_loading import load_pretrained


class ModularPolicy(PipelinePolicy, ABC):
    """Adapter for the modular pipeline of one class of blocks."""

    index_name = MODULAR
    missing_arguments = frozenset({"guidance_scale"})
    blocks_name: ClassVar[str]
    """The diffusers class of the blocks, whose pipeline is ``pipeline_name``."""
    left_out: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def pipeline_blocks(cls) -> Any:
        """Return the blocks."""
        blocks = diffusers_class(cls.blocks_name)()
        for name in cls.left_out:
            blocks.sub_blocks.pop(name)
        return blocks

    @classmethod
    def setting_defaults(cls) -> Mapping[str, Any]:
        """Return the defaults of the blocks' settings, which the index has besides components."""
        return {spec.name: spec.default for spec in cls.pipeline_blocks().expected_configs}

    @classmethod
    def assembled(cls, folder: Path, settings: DiffusionSettings, components: Mapping[str, Any]) -> Any:
        """Return the pipeline of the provided components and, for all others, those in the folder."""
        pipeline, quantized = cls.pipeline_blocks().init_pipeline(), cls.quantization(folder, settings)
        loaded = {}
        for name in pipeline.component_names:
            spec = pipeline.get_component_spec(name)
            if name in components:
                loaded[name] = components[name]
            elif (folder / name).is_dir() and name != "guider":
                options = {"quantization_config": quantized[name]} if name in quantized else {}
                loaded[name] = cls._loaded(spec.type_hint, folder / name, settings, **options)
        pipeline.register_components(**loaded)
        return pipeline

    @classmethod
    def _loaded(cls, kind: Any, folder: Path, settings: DiffusionSettings, **options: Any) -> Any:
        if not issubclass(kind, torch.nn.Module):
            return load_pretrained(kind, folder, label="model.path")
        # Decoding is a small part of the work, and its rounding affects rewards.
        dtype = torch.float32 if folder.name in cls.decoder_names else settings.dtype
        return load_pretrained(kind, folder, label="model.path", dtype=dtype, use_safetensors=True, **options)

    @classmethod
    def check_folder(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        """Check that a folder has the family's components, with the classes its blocks expect; return its index."""
        index = super().check_folder(folder, settings)
        expected = {spec.name: spec for spec in cls.pipeline_blocks().expected_components}
        # A scheduler or guider that the index takes from another repository differs from the blocks' default.
        named = (name for name in ("scheduler", "guider") if name in index)
        for name in (*cls.text_parts, *cls.denoiser_names, "vae", *named):
            _, kind = index.get(name) or (None, None)
            if kind is None:
                raise ConfigError(
                    f"model.path '{folder}' has no folder '{name}', which '{cls.family}' loads; its {MODULAR} may name "
                    "another repository. Download it into the folder under this name."
                )
            if issubclass(expected[name].type_hint, torch.nn.Module) and kind != expected[name].type_hint.__name__:
                raise ConfigError(
                    f"model.path '{folder}' has the {name} {kind}, but model.policy '{cls.family}' knows "
                    f"{expected[name].type_hint.__name__}. Choose another model or family."
                )
        return index

    @classmethod
    def missing_parts(cls, folder: Path) -> tuple[str, ...]:
        """Return no components: a folder that lacks one is refused."""
        return ()

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        """Check the scheduler and the guider if the folder has them; otherwise the blocks' defaults are used."""
        if (index.get("scheduler") or [None])[0] is not None:
            super()._check_scheduler(folder, index)
        if (index.get("guider") or [None])[0] is not None:
            check_guider(folder, cls.family, index)

    def scale_of(self, pixels: int) -> None:
        """Do nothing: the autoencoder's config gives the width of its latents."""

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        call = super().pipeline_call(steps, negative_prompt)
        guider = {"guidance_scale": max(1.0, self.settings.guidance_scale)}
        return replace(call, guider=guider, blocks=self.blocks_name, left_out=self.left_out)

    def step(self, *names: str) -> Any:
        """Return a block by the path of names to it, to read its settings."""
        block = self.pipeline._blocks
        for name in names:
            block = block.sub_blocks[name]
        return block
