"""Weights that an option of a reward names: read from safetensors only, and all of them must fit the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.models.weights.finite import check_tensors

#: Maps a published tensor to the tensors of a model, by name.
Names = Callable[[str, Tensor], Mapping[str, Tensor]]
_COPY = "It must be a safetensors copy of the published file with its names kept; docs/rewards.md says how to make one."


def as_stored(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Return a tensor under its published name."""
    return {name: tensor}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """A safetensors file of a reward."""

    reward: str
    file: str
    option: str = "weights"
    remedy: str = _COPY
    """The requirement for the file, in messages."""

    def read(self) -> dict[str, Tensor]:
        """Return its tensors; raise ConfigError if it cannot be read, or contains numbers that are not finite."""
        try:
            stored: dict[str, Tensor] = load_file(self.file)
        except (OSError, SafetensorError) as error:
            raise self.unusable(str(error).splitlines()[0]) from None
        check_tensors(stored, f"reward '{self.reward}': option '{self.option}': '{self.file}'")
        return stored

    def fill(
        self, model: nn.Module, stored: Mapping[str, Tensor], names: Names = as_stored, *, assign: bool = False
    ) -> None:
        """Load all parameters of a model; raise ConfigError if a tensor is missing, unexpected or of another shape.

        Args:
            stored: tensors by their published names.
            names: maps each to the model's names.
            assign: use the stored tensors instead of copying them.
        """
        named = {key: value for name, tensor in stored.items() for key, value in names(name, tensor).items()}
        try:
            missing, unexpected = model.load_state_dict(named, strict=False, assign=assign)
        except RuntimeError as error:
            raise self.unusable(str(error).splitlines()[1].strip()) from None
        wrong = [*(name for name in missing if not name.endswith("position_ids")), *unexpected]
        if wrong:
            raise self.unusable(f"{len(wrong)} tensors do not fit the model, {wrong[0]} first")

    def perceptron(self, stored: Mapping[str, Tensor], width: int) -> nn.Sequential:
        """Return the layers of LAION's aesthetic predictor, also used by ImageReward: widths 1024, 128, 64, 16, 1.
        There is dropout between them and no activation. Raises ConfigError if the layers are different. ``stored``:
        ``layers.0.weight`` and so on."""
        widths = (width, 1024, 128, 64, 16, 1)
        # The numbers of its linear layers among dropouts in the published file.
        places = (0, 2, 4, 6, 7)
        layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
        named = nn.ModuleDict({str(place): layer for place, layer in zip(places, layers, strict=True)})
        self.fill(named, {name.removeprefix("layers."): tensor for name, tensor in stored.items()})
        return nn.Sequential(*layers).eval().requires_grad_(False)

    def unusable(self, why: str) -> ConfigError:
        """Return the error of a file that cannot be used."""
        return ConfigError(
            f"reward '{self.reward}': option '{self.option}': '{self.file}' cannot be used: {why}. {self.remedy}"
        )
