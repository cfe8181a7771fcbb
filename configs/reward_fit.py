"""The config of ``flowmill reward fit``: judgments, a backbone, and how its head is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from flowmill.configs.base import Component, Later, Section
from flowmill.configs.data import DataSection
from flowmill.configs.load import checked, origin, read_config
from flowmill.configs.model import LoraSection
from flowmill.configs.overrides import apply_overrides
from flowmill.configs.schema import StoreSection


class JudgmentRows(DataSection):
    """The rows of one source of judgments."""

    setting: ClassVar[str] = "data"
    trained: ClassVar[bool] = False

    bad_rows: Literal["stop", "leave_out"] = "leave_out"


class FitConfig(Section):
    """One fit of a reward."""

    name: str | None = Field(None, pattern=r"^\w[\w.-]*$", max_length=100)
    """Name that runs find it by in the store, in the option 'run' of the reward `fitted`; the name of the config file
    when absent. Each fit under a name has a number, from 1. Does not change results."""
    data: tuple[str, ...] = Field(min_length=1)
    """Judgments: a value that `data.train` of a run may have, or preferences/ID of the store."""
    heldout: tuple[str, ...] = ()
    """Judgments to measure on; when empty, a share of the prompts of `data`."""
    backbone: Component
    """pixels, clip, latents, likelihood or text, with its options."""
    lora: Annotated[LoraSection | None, Later()] = None
    """Low-rank adapters on the model of `clip`, `text` or `likelihood`, on all linear layers of its blocks where
    `targets` is absent; without this section only the head is trained."""
    share: float = Field(0.2, gt=0, lt=1)
    """Share of the judgments that is held out."""
    ties: Literal["half", "davidson"] = "half"
    """A tie is half a win of each, or an outcome of Davidson's model."""
    scale: tuple[float, float] = (1.0, 5.0)
    """Lowest and highest rating."""
    seed: int = Field(0, ge=0)
    """Seed of the split, of the first weights, and of the order of judgments."""
    updates: PositiveInt | None = None
    """Optimizer updates; ten passes over the judgments when absent."""
    batch_size: PositiveInt = 64
    """Judgments per update."""
    learning_rate: float = Field(1e-3, gt=0)
    """Learning rate of AdamW."""
    weight_decay: float = Field(1e-2, ge=0)
    """Weight decay of AdamW."""
    checkpoint_every: NonNegativeInt = 100
    """Updates between two checkpoints, from which a stopped fit goes on; 0 writes none. Does not change results."""
    device: str = "auto"
    """Torch device, or auto."""
    store: StoreSection = StoreSection()
    """Store of the result, and of preferences that `data` names."""

    @field_validator("data", "heldout", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _ordered(self) -> FitConfig:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale is {list(self.scale)}; it must be two numbers, the lower first")
        if self.lora is not None and self.lora.start is not None:
            raise ValueError("lora.start belongs to policies; adapters of a reward start at zero. Remove it")
        return self


def load_fit(path: str | Path, overrides: Sequence[str] = ()) -> FitConfig:
    """Return the config in a YAML file, with ``key=value`` overrides.

    Paths of `data` and `heldout` are relative to the working directory, or to the folder of the file.
    """
    source = Path(path)
    data = read_config(source)
    where = origin(data, FitConfig, str(source), overrides)
    data = apply_overrides(data, overrides)
    data["name"] = data.get("name") or re.sub(r"[^\w.-]", "-", source.stem)
    config = checked(data, FitConfig, where)
    return config.model_copy(
        update={
            name: tuple(_path_of(each, source.parent) for each in getattr(config, name)) for name in ("data", "heldout")
        }
    )


def _path_of(name: str, folder: Path) -> str:
    return str(folder / name) if not Path(name).exists() and (folder / name).exists() else name
