"""The interface of engines: complete prompts, and prove that they use the policy's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from models.maths.generation import Completion, Forward, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Prompts to complete; there are N of them."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each, at least one."""
    sampling: Sampling
    """How tokens are drawn, and where a completion ends."""
    stop: tuple[str, ...]
    """The texts that ``sampling.stopped`` looks for."""
    vocabulary: int
    """Ids are below this."""
    seeds: Sequence[int]
    """One of 63 bits for each prompt, for engines that draw by themselves."""
    forward: Forward
    """The policy in this process, for an engine that draws with it."""
    uniforms: Callable[[int], Tensor] | None
    """Position -> (N,) float64 in [0, 1), a draw for each prompt, for that engine; None: the likeliest tokens."""
    width: int
    """Padded width of prompts, and ``size``, prompts of a batch: the same for all of a run, for the same bits."""
    size: int
    """See ``width``."""
    distinct: int
    """Prompts of a batch that differ, at most, where rows of a group stand together."""
    device: torch.device
    """Where the policy is."""


class Engine(Protocol):
    """Draws completions. Its log-probs are kept as a measure; training uses the policy's own."""

    @property
    def reloads(self) -> bool:
        """Whether weights are brought to it from here, which one process must do for all."""

    @property
    def tolerance(self) -> float | None:
        """Mean distance from the policy's log-probs, in nats per token, with which its texts are taken; None: any."""

    def bring(self, policy: str, write: Callable[[Path], None]) -> None:
        """Bring the weights of a policy to the engine, where that is for us to do.

        Args:
            policy: its name, another one for other weights.
            write: writes it into a new folder as ``from_pretrained`` reads it.

        Raises:
            EngineError: the engine does not take them.
        """

    def prove(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Have the engine show that it has the policy's weights.

        Args:
            ids: W tokens of a text.
            log_probs: the policy's log-probs of all but the first, at temperature 1.

        Raises:
            EngineError: it says something else, or nothing that can be read.
        """

    def complete(self, asked: Asked) -> list[Completion]:
        """Return a completion of each prompt.

        Raises:
            EngineError: it gives something else.
        """
