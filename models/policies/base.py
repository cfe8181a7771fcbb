"""What every model family must provide, whatever its policy makes; what one kind adds is in a file of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from configs.errors import ConfigError
from configs.schema import RunConfig
from models.policies.attention import BACKENDS, Backend
from models.policies.parts import Part

if TYPE_CHECKING:
    from torch import nn

    from models.compute_meter import Meter
    from models.policies.tokenization import Reader
    from models.weights.stored_weights import StoredWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """How a policy is loaded and computes."""

    dtype: torch.dtype = field(default_factory=lambda: torch.float32)
    """Dtype of weights and forward pass."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of all tensors."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    attention: str | None = None
    """Attention backend, None for the library's default."""
    device_map: str | None = None
    """How the model's parts are placed over devices; None: all on ``device``."""
    compile: bool = False
    """Compile the repeated blocks."""
    empty: bool = False
    """Make trained modules without weights, on the meta device: who spreads them over ranks then reads each rank's
    part."""


class Policy(ABC):
    """One model family: loads its parts, and knows which of them are trained."""

    kind: ClassVar[str] = "diffusion"
    """What its policies are: a name of the table of kinds, or "package.module:Class"."""
    pipeline_name: ClassVar[str | None] = None
    """Class of the diffusers pipeline it loads; none where its models are no pipelines."""
    attentions: ClassVar[Mapping[str, Backend]] = BACKENDS
    """Values that ``model.attention`` can have, the default first."""
    readers: ClassVar[tuple[Reader, ...]] = ()
    """How its tokenizers read prompts, where they cut off what is too long."""
    blocks: ClassVar[tuple[str, ...]]
    """Attribute names of the trained modules' block lists, for sharding, compiling and checkpointing."""
    encoding_parts: ClassVar[frozenset[Part]] = frozenset({Part.TEXT})
    """What encoding prompts needs, whatever the options say; see ``parts_to_encode``."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Published LoRA targets of the family; each must match at least one module."""

    def __init__(self, settings: PolicySettings) -> None:
        """Keep the settings."""
        self.settings = settings
        self.stored: dict[str, StoredWeights] = {}
        """Where the trained modules' weights are, by the name they have in the model's folder."""
        self.meter: Meter | None = None
        """Counts what the models compute, where somebody wants to know."""
        self.lockstep = False
        """Every call must run every trained module, rows for it or not: the other ranks wait for this one's part."""

    @property
    def facts(self) -> dict[str, str]:
        """What records say of how it computes, where that follows from the model."""
        return {}

    @classmethod
    @abstractmethod
    def settings_for(
        cls, config: RunConfig, *, dtype: torch.dtype, device: torch.device, empty: bool
    ) -> PolicySettings:
        """Return how a run's policy is loaded and called."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, settings: Any, parts: frozenset[Part], options: Mapping[str, Any]) -> Policy:
        """Load the wanted parts of a model's folder.

        Args:
            folder: local.
            settings: what ``settings_for`` returns.
            parts: which.
            options: of the family.

        Raises:
            ConfigError: the folder holds another model, or an option or size is not valid.
        """

    @classmethod
    def load_critic(
        cls, folder: Path, settings: Any, *, own: bool, lora: Any, seed: int, like: Path | None = None
    ) -> Any:
        """Load a critic of such policies; return its ``models.policies.trainable:Trainable``, fresh.

        Args:
            folder: of the model whose backbone it has.
            settings: what ``settings_for`` returns.
            own: it has a backbone of its own, else a head on what the policy computes.
            lora: ``models.weights.lora:LoraSpec`` of adapters for the backbone, or None to train all of it.
            seed: seed of the adapters' initial weights.
            like: folder of the base model, where that is another: the critic must read what its policy writes.

        Raises:
            ConfigError: the family has no critics, or the critic's model does not fit.
        """
        raise ConfigError(
            f"model.policy: {cls.__name__} has no critic, which optimize.algorithm asks for. Choose an algorithm that "
            "needs none, such as grpo."
        )

    @classmethod
    def trained_on_meta(cls, folder: Path, *, critic: bool = False) -> Mapping[str, Any]:
        """Return what ``trained`` is of a local model, on the meta device, by its configs alone.

        Args:
            folder: of the model; checked.
            critic: of a critic with a backbone of its own instead.

        Returns:
            Modules by name; none where only loading the model tells.
        """
        return {}

    @classmethod
    def read_adapter(cls, path: str) -> Any:
        """Read adapters to begin as; return a ``models.weights.lora_start:StartAdapter``.

        Args:
            path: a safetensors file, or a folder with one.

        Raises:
            ConfigError: there are none, they are of a kind that is not trained, or the family reads none.
        """
        raise ConfigError(
            f"model.lora.start: {cls.__name__} reads no adapters. Leave it out, or write its class a read_adapter()."
        )

    @classmethod
    def check_single_files(cls, files: Mapping[str, str], folder: Path | None) -> frozenset[str]:
        """Return the components that single files hold, checked to be those of a model's folder.

        Args:
            files: by component, or by '' one that is taken for all it holds.
            folder: that configs and all else come from; None where it is not here yet, and files alone are looked at.

        Raises:
            ConfigError: they hold something else or not all of it, or the family reads none.
        """
        raise ConfigError(
            f"model.single_file: {cls.__name__} reads no single files. Remove it; model.path has all of a model."
        )

    @classmethod
    def write_single_files(cls, files: Mapping[str, str], folder: Path, target: Path) -> None:
        """Write a model's folder, of single files what they hold, of another folder all else.

        Args:
            files: by component, or by '' one that is taken for all it holds.
            folder: that configs and all else come from.
            target: where to; must not exist.

        Raises:
            ConfigError: see ``check_single_files``.
        """
        cls.check_single_files(files, folder)

    @classmethod
    def parts_to_encode(cls, options: Mapping[str, Any]) -> frozenset[Part]:
        """Return what encoding prompts needs, by ``model.options``."""
        return cls.encoding_parts

    @classmethod
    def trained_parts(cls, config: RunConfig) -> frozenset[Part]:
        """Return what is loaded with the policy that a run trains and samples with."""
        return frozenset({Part.DENOISER})

    @property
    @abstractmethod
    def trained(self) -> dict[str, Any]:
        """Trainable modules by the name they have in the model's folder."""

    @abstractmethod
    def trainable(self, lora: Any, *, seed: int) -> Any:
        """Make this freshly loaded policy trainable; return its ``models.policies.trainable:Trainable``.

        Args:
            lora: ``models.weights.lora:LoraSpec`` of adapters to add, or None to train all weights.
            seed: seed of the adapters' initial weights.

        Raises:
            ConfigError: a LoRA target matches no module.
        """

    def modules(self) -> dict[str, nn.Module]:
        """Return every module that is loaded, by its name in the model's folder."""
        return dict(self.trained)

    def move_decoder(self, device: torch.device) -> None:  # noqa: B027 - a family may have none
        """Move what only decodes samples: off the device while nothing is decoded, and back."""

    @abstractmethod
    def save_lora(self, folder: Path) -> None:
        """Write the trained modules' LoRA weights in the form the model's own library reads, alpha included."""
