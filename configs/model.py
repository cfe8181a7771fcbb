"""Settings of a model: its family, its source, and the inputs of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from flowmill.configs.base import Component, Later, Section
from flowmill.configs.model_families import family_of, spec_of


class LoraSection(Section):
    """Low-rank adapters; without this section all weights of the denoiser are trained."""

    rank: int = Field(32, ge=1, le=1 << 16)
    """Rank of the update."""
    alpha: int = Field(64, ge=1)
    """Scale of the update is alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Module name suffixes to adapt; the published ones of the model family when absent."""
    start: str | None = None
    """A safetensors file or folder with initial adapters, which then determine rank, alpha and layers."""

    def said(self, name: str) -> Any:
        """Return a setting of the adapters, or None if ``start`` determines it."""
        return getattr(self, name) if self.start is None or name in self.model_fields_set else None

    def brief(self) -> str:
        """Return a short description of the adapters."""
        settings = [f"{name} {self.said(name)}" for name in ("rank", "alpha") if self.said(name) is not None]
        return ", ".join([*settings, *([] if self.start is None else [f"from {PurePath(self.start).name}"])])

    @model_serializer(mode="wrap")
    def _as_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the settings that ``start`` determines, and an absent ``start``, as in records of older runs."""
        written: dict[str, Any] = write(self)
        absent = ("start",) if self.start is None else {"rank", "alpha", "targets"} - self.model_fields_set
        return {name: value for name, value in written.items() if name not in absent}


Quantizer = Literal["int8", "float8", "int4", "nf4"]


class QuantizeSection(Section):
    """Linear layers of frozen models in few bits; adapters next to them stay float32."""

    name: Quantizer | None = None
    """Weights of the denoiser or language model: int8, float8 and int4 by torchao, nf4 by bitsandbytes."""
    text_encoders: Quantizer | None = None
    """Weights of a denoiser's text encoders."""


class ModelSection(Section):
    """The base model and the inputs of its calls."""

    removed: ClassVar[Mapping[str, str]] = {
        "checkpoint": (
            "Make one file of the folder with torch's dcp_to_torch_save, and write its weights with the model's own "
            "save_pretrained() to a folder for model.path, or as adapters for model.lora.start."
        ),
        "device_map": "A model that does not fit one device: execution.strategy 'fsdp', or model.quantize.",
    }

    policy: str
    """Model family: a name from the policies table, or "package.module:Class"; that of a local folder when absent."""
    kind: str | None = None
    """Kind of a custom family: "diffusion" when absent, or a custom kind as "package.module:Class"."""
    path: str | None = None
    """A local diffusers folder or a Hugging Face hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    single_file: Annotated[str | dict[str, str] | None, Later()] = None
    """A safetensors file in the layout of the model's authors, or a mapping of files by component; replaces the weights
    of path."""
    start: Annotated[str | None, Later()] = Field(None, pattern=r"^[^@/]+@[0-9]+$")
    """The trained policy of another run of the store, as RUN@EPOCH: training starts from it, from its moving average
    where it has one, and it is the reference of a KL."""
    start_config: Annotated[str | None, Later()] = None
    """Config file of the run that `start` names: `flowmill run` completes that run first, in the same store."""
    build: Component | None = None
    """Builds and pre-trains a small base model instead of loading one, as the quickstart does."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of frozen weights and of the forward pass; trained weights stay float32."""
    height: int = Field(512, ge=1, le=1 << 16)
    """Image height in pixels."""
    width: int = Field(512, ge=1, le=1 << 16)
    """Image width in pixels."""
    frames: int = Field(1, ge=1, le=1 << 16)
    """Frames of a clip; 1 for images."""
    guidance_scale: float = Field(1.0, ge=0)
    """Guidance in rollouts, training and evaluation: classifier-free (1 is off), or an input of guidance-distilled
    models."""
    negative_prompt: str = ""
    """Negative prompt for classifier-free guidance."""
    lora: LoraSection | None = None
    """Train low-rank adapters instead of all weights."""
    quantize: Annotated[QuantizeSection | None, Later()] = None
    """Quantize the frozen base model, which then needs adapters to train: less memory, slower, less exact."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time, equal gradients."""
    attention: str | None = None
    """Attention backend of diffusers (native, flash, sage, ...), or for language models of transformers (sdpa, eager,
    flash_attention_2, ...); the library's default when absent."""
    compile: bool = False
    """Compile the denoiser's blocks: slower start, above all the first time on a machine, but usually faster steps."""
    vae_tiling: bool = False
    """Decode large images and clips in overlapping tiles: less memory, slightly different images at tile borders."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the model family."""

    @model_validator(mode="before")
    @classmethod
    def _with_family(cls, data: Any) -> Any:
        path = data.get("path") if isinstance(data, dict) and data.get("policy") is None else None
        return {**data, "policy": family_of(path)} if isinstance(path, str) else data

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.build is None):
            raise ValueError(
                "model needs exactly one of 'path' (a diffusers folder or hub id) and 'build' (a quickstart builder)"
            )
        if self.single_file is not None and (self.path is None or not self.single_file):
            raise ValueError(
                "single_file is a file of weights, or files by component, and needs 'path': the diffusers folder or "
                "hub id with the configs, the tokenizers and all other components"
            )
        if self.start is not None and self.lora is not None and self.lora.start is not None:
            raise ValueError("start and lora.start both give the weights that training starts from; leave one out")
        if self.start_config is not None and self.start is None:
            raise ValueError("start_config makes the run that 'start' names as RUN@EPOCH, and there is no 'start'")
        return self

    @property
    def single_files(self) -> dict[str, str]:
        """The single files by component; the key '' means all components that the file contains."""
        return {"": self.single_file} if isinstance(self.single_file, str) else self.single_file or {}

    @property
    def makes_clips(self) -> bool:
        """Whether samples are clips, with a dimension of frames, which may have one."""
        return self.frames > 1 or spec_of(self.policy).clips is not None

    @property
    def quantizer(self) -> str | None:
        """Quantizer of the denoiser or language model; None: it is not quantized."""
        return None if self.quantize is None else self.quantize.name

    @property
    def base_name(self) -> str:
        """Name of the base model: that of its single file, folder, hub id or builder."""
        if self.single_files:
            return PurePath(next(iter(self.single_files.values()))).stem
        return self.path.rstrip("/").split("/")[-1] if self.path else str(self.build and self.build.name)
