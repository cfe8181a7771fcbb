"""Benchmarks: they pin prompts, seed, sampler and rewards, so that two results differ only by the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError, field_validator

from configs.base import Section
from configs.errors import ConfigError
from configs.overrides import read_yaml
from configs.rewards import RewardSection
from configs.suggestions import did_you_mean
from configs.validation_messages import explain

#: Folder of the built-in benchmarks.
FOLDER = Path(__file__).parent / "benchmarks"


class Benchmark(Section):
    """One benchmark."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Its name; the file's when absent."""
    prompts: str | None = None
    """File of prompts next to this one, or a dataset id; --prompts gives it if no list can be shipped."""
    column: str = "prompt"
    """Column or key that holds the prompt; the others become metadata for rewards."""
    split: str = "train"
    """Split of a dataset id."""
    images: PositiveInt = 4
    """Images per prompt."""
    seed: int = Field(0, ge=0)
    """Seed of the initial noise: the same for every model."""
    steps: PositiveInt
    """Denoising steps."""
    solver: str = "euler"
    """Deterministic solver."""
    guidance_scale: float = Field(1.0, ge=0)
    """Guidance."""
    negative_prompt: str = ""
    """Negative prompt for classifier-free guidance."""
    height: PositiveInt
    """Image height in pixels."""
    width: PositiveInt
    """Image width in pixels."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the forward pass."""
    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    """The reported rewards."""

    @field_validator("rewards")
    @classmethod
    def _all_scored(cls, rewards: tuple[RewardSection, ...]) -> tuple[RewardSection, ...]:
        for section in rewards:
            if section.excludes:
                raise ValueError(
                    f"'{section.slot}' leaves samples out where it fails: two models' means would differ in which"
                )
        return rewards

    @property
    def title(self) -> str:
        """The name with all pinned settings: only figures with the same title are comparable."""
        return (
            f"{self.name}, {self.images} per prompt, {self.steps} {self.solver} steps, guidance "
            f"{self.guidance_scale:g}, {self.height}x{self.width}, {self.dtype}, seed {self.seed}"
        )


def load_benchmark(name: str, *, prompts: str | None = None) -> Benchmark:
    """Return a built-in benchmark, or one of a file.

    Args:
        name: name of a built-in benchmark, or a YAML file.
        prompts: prompts that replace its own.

    Raises:
        ConfigError: it does not exist, is malformed, or has no prompts.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not file.is_file():
        known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
        raise ConfigError(f"benchmark '{name}' does not exist. {did_you_mean(name, known)} Or name a YAML file.")
    try:
        data: Any = read_yaml(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ConfigError(f"benchmark file '{file}' holds no settings like 'steps: 40'.")
        made = Benchmark.model_validate({"name": file.stem, **data, **({"prompts": prompts} if prompts else {})})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"benchmark file '{file}' cannot be read: {error}") from None
    except ValidationError as error:
        raise ConfigError("\n".join(f"{file}: {explain(dict(item))}" for item in error.errors())) from None
    if made.prompts is None:
        raise ConfigError(f"benchmark '{made.name}' ships no prompts. Give its published list with --prompts FILE.")
    local = file.parent / made.prompts
    return made.model_copy(update={"prompts": str(local.resolve())}) if not prompts and local.is_file() else made
