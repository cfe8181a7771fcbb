"""Sections inside ``optimize``: the learning rate schedule, and the average of the weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from flowmill.configs.base import Section

#: Decay of a moment of AdamW.
Beta = Annotated[float, Field(ge=0, lt=1)]


class EmaSection(Section):
    """Exponential moving average of the trained weights."""

    decay: float = Field(0.9, ge=0, lt=1)
    """Upper bound of the decay; the first updates use (1 + n) / (10 + n)."""
    every: int = Field(1, ge=1)
    """Update the average after every this many optimizer updates."""


class ScheduleSection(Section):
    """The learning rate over optimizer updates, counted over the whole run."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Constant, or decay to the share ``final`` of the learning rate along a line or half a cosine."""
    warmup_updates: int = Field(0, ge=0)
    """Updates n of linear warm-up: 1 / (n + 1), 2 / (n + 1), ... of the rate."""
    total_updates: int | None = Field(None, ge=1)
    """Update at which the linear or cosine decay ends, including warm-up; the rate stays constant afterwards. Not
    derived from run.epochs, so that raising run.epochs does not change finished epochs."""
    final: float = Field(0.0, ge=0, le=1)
    """Share of the rate at the end of the decay."""

    @model_validator(mode="after")
    def _has_an_end(self) -> ScheduleSection:
        falls = self.name != "constant"
        if falls and (self.total_updates is None or self.total_updates <= self.warmup_updates):
            raise ValueError(
                f"schedule '{self.name}' falls until total_updates, which is {self.total_updates} with warmup_updates "
                f"{self.warmup_updates}. Set total_updates above it, for example to run.epochs x updates_per_epoch"
            )
        if not falls and (self.total_updates is not None or self.final != 0):
            raise ValueError(
                "schedule 'constant' never falls, so total_updates and final do nothing. Remove them, or set name to "
                "'linear' or 'cosine'"
            )
        return self
