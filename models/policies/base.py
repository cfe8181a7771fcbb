"""The interface that every model family implements; each kind of policy extends it in a separate file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.model import QuantizeSection
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.attention import BACKENDS, Backend
from flowmill.models.policies.compute_meter import Meter
from flowmill.models.policies.parts import Part
from flowmill.models.policies.tokenization import Reader
from flowmill.models.weights.quantized import compute_dequantized
from flowmill.models.weights.stored_weights import StoredWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings for loading and running a policy."""

    dtype: torch.dtype = field(default_factory=lambda: torch.float32)
    """Dtype of weights and forward pass."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gradient_checkpointing: bool = False
    attention: str | None = None
    """Attention backend, None for the library's default."""
    compile: bool = False
    empty: bool = False
    """Create trained modules without weights, on the meta device; sharding then reads each rank's part."""
    quantize: QuantizeSection | None = None
    """Quantizers of frozen weights; see ``flowmill.models.weights.quantized``."""


def common_settings(config: RunConfig, *, dtype: torch.dtype, device: torch.device, empty: bool) -> dict[str, Any]:
    """Return the fields of ``PolicySettings`` of a run's policy that are the same for every family."""
    section = config.model
    return {
        "dtype": dtype,
        "device": device,
        "gradient_checkpointing": section.gradient_checkpointing,
        "attention": section.attention,
        "empty": empty,
        "quantize": section.quantize,
    }


class Policy(ABC):
    """One model family: loads its parts and defines which of them are trained."""

    kind: ClassVar[str] = "diffusion"
    """Kind of its policies: a name in the table of kinds, or "package.module:Class"."""
    pipeline_name: ClassVar[str | None] = None
    """Class of the diffusers pipeline it loads; None if its models are not pipelines."""
    attentions: ClassVar[Mapping[str, Backend]] = BACKENDS
    """Valid values of ``model.attention``, the default first."""
    readers: ClassVar[tuple[Reader, ...]] = ()
    """How its tokenizers read prompts, for those that truncate long ones."""
    blocks: ClassVar[tuple[str, ...]]
    """Attribute names of the trained modules' block lists, for sharding, compiling and checkpointing."""
    encoding_parts: ClassVar[frozenset[Part]] = frozenset({Part.TEXT})
    """Parts that encoding prompts needs under any options; see ``parts_to_encode``."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Published LoRA targets of the family; each must match at least one module."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.untrained: tuple[str, ...] = ()
        """Names of parts of the trained modules that stay frozen, as they occur in the names of parameters."""
        self.stored: dict[str, StoredWeights] = {}
        """Stored weights of the trained modules, by their names in the model's folder."""
        self.rounding = 1.0
        """Factor of rounding errors, from the model's predictions to those that samples are drawn from."""
        self.meter: Meter | None = None
        """Counts the models' computation; None: it is not counted."""
        self.lockstep = False
        """Every call must run every trained module, even without rows: the other ranks wait for this rank's part."""

    @property
    def facts(self) -> dict[str, str]:
        """Facts for records on how it computes, as far as they follow from the model."""
        return {}

    @classmethod
    def settings_for(
        cls, config: RunConfig, *, dtype: torch.dtype, device: torch.device, empty: bool
    ) -> PolicySettings:
        """Return the settings of a run's policy."""
        return PolicySettings(**common_settings(config, dtype=dtype, device=device, empty=empty))

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, settings: Any, parts: frozenset[Part], options: Mapping[str, Any]) -> Policy:
        """Load some parts of a model's folder; raise ConfigError if the folder holds another model, or an option
        or size is not valid."""

    @classmethod
    def load_critic(
        cls,
        folder: Path,
        settings: Any,
        *,
        own: bool,
        lora: Any,
        seed: int,
        like: Path | None = None,
        log_probs: bool = False,
    ) -> Any:
        """Load a critic for such policies; return its ``flowmill.models.policies.trainable:Trainable``, untrained.
        Raises ConfigError if the family has no critics, or the critic's model does not fit.

        Args:
            own: True: it has its own backbone; False: it is a head on the policy's hidden states.
            lora: ``flowmill.models.weights.lora:LoraSpec`` of adapters for the backbone, or None to train all of it.
            like: folder of the base model, if it differs: the critic must use the policy's tokens.
            log_probs: it also reads the log-probs of sampled tokens.
        """
        raise ConfigError(
            f"model.policy: {cls.__name__} has no critic, which optimize.algorithm asks for. Choose an algorithm that "
            "needs none, such as grpo."
        )

    @classmethod
    def trained_on_meta(cls, folder: Path, *, critic: bool = False) -> Mapping[str, Any]:
        """Return the ``trained`` modules of a local model on the meta device, from its configs alone. ``critic``:
        return those of a critic with its own backbone instead. Returns modules by name; empty if they only exist
        once the model is loaded."""
        return {}

    @classmethod
    def read_adapter(cls, path: str) -> Any:
        """Read adapters to start training from; return a ``flowmill.models.weights.lora_start:StartAdapter``. Raises
        ConfigError if there are no adapters, their kind cannot be trained, or the family does not read adapters.
        ``path``: a safetensors file, or a folder with one."""
        raise ConfigError(
            f"model.lora.start: {cls.__name__} reads no adapters. Leave it out, or write its class a read_adapter()."
        )

    @classmethod
    def check_single_files(cls, files: Mapping[str, str], folder: Path | None) -> frozenset[str]:
        """Return the components that single files hold, after checking that they fit a model's folder; raise
        ConfigError if they hold another model or only part of one, or the family does not read single files.

        Args:
            files: paths by component; under '' a file of which all components are used.
            folder: source of configs and all other files; None if it is not downloaded: only the files are checked.
        """
        raise ConfigError(
            f"model.single_file: {cls.__name__} reads no single files. Remove it; model.path has all of a model."
        )

    @classmethod
    def write_single_files(cls, files: Mapping[str, str], folder: Path, target: Path) -> None:
        """Write a model's folder: components from single files, all other files from another folder. Raises
        ConfigError, see ``check_single_files``. ``target``: folder to write; must not exist."""
        cls.check_single_files(files, folder)

    @classmethod
    def parts_to_encode(cls, options: Mapping[str, Any]) -> frozenset[Part]:
        """Return the parts that encoding prompts needs under ``model.options``: also the autoencoder, if prompts come
        with references."""
        return cls.encoding_parts | {Part.VAE} if options.get("references") else cls.encoding_parts

    @classmethod
    def untrained_parts(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return ``untrained`` under ``model.options``."""
        return ()

    @classmethod
    def trained_parts(cls, config: RunConfig) -> frozenset[Part]:
        """Return the parts to load for the policy that a run trains and samples with."""
        return frozenset({Part.DENOISER})

    @property
    @abstractmethod
    def trained(self) -> dict[str, Any]:
        """Trainable modules by their names in the model's folder."""

    @abstractmethod
    def trainable(self, lora: Any, *, seed: int) -> Any:
        """Make this freshly loaded policy trainable; return its ``flowmill.models.policies.trainable:Trainable``.
        Raises ConfigError if a LoRA target matches no module. ``lora``: ``flowmill.models.weights.lora:LoraSpec`` of
        adapters to add, or None to train all weights."""

    @property
    def entered(self) -> list[nn.Module]:
        """Return parts of trained modules that are also called by themselves."""
        return []

    def modules(self) -> dict[str, nn.Module]:
        """Return every loaded module, by its name in the model's folder."""
        return dict(self.trained)

    def computing_dequantized(self, section: QuantizeSection | None, parts: frozenset[Part]) -> Self:
        """Let the quantized layers of loaded parts compute with their dequantized weights, and return the policy; raise
        ConfigError if a part was loaded without any."""
        texts = [module for name, module in self.modules().items() if name not in self.trained]
        if section is not None and section.name is not None and Part.DENOISER in parts:
            compute_dequantized(self.trained.values(), section.name)
        if section is not None and section.text_encoders is not None and Part.TEXT in parts:
            compute_dequantized(texts, section.text_encoders)
        return self

    def move_decoder(self, device: torch.device) -> None:  # noqa: B027 - a family may have none
        """Move modules that only decode samples: off the device when not decoding, and back."""

    @abstractmethod
    def save_lora(self, folder: Path) -> None:
        """Write the trained modules' LoRA weights, alpha included, in the format of the model's own library."""
