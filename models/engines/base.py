"""The interface of engines: complete prompts, and prove that they use the policy's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flowmill.models.maths.generation import Completion, Forward, TokenSampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request to complete N prompts."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each, at least one."""
    starts: Sequence[int]
    """Position of the first token after each prompt, for the local engine."""
    sampling: TokenSampling
    stop: tuple[str, ...]
    """The stop texts of ``sampling.stopped``."""
    vocabulary: int
    """Ids are below this."""
    seeds: Sequence[int]
    """A seed of 63 bits for each prompt, for engines with their own generator."""
    forward: Forward
    """The policy in this process, for the local engine."""
    uniforms: Callable[[int], Tensor] | None
    """Position -> (N,) float64 in [0, 1), a draw for each prompt, for the local engine; None: the likeliest tokens."""
    width: int
    """Padded width of prompts; constant in a run, as ``size`` is, so that results are bitwise equal."""
    size: int
    """Prompts of a batch, see ``width``."""
    distinct: int
    """Maximum number of different prompts in a batch whose groups are contiguous."""
    device: torch.device


class Engine(Protocol):
    """Draws completions. Its log-probs serve as a measure; training uses the policy's own. If it has a method
    ``reach``, without arguments, a run begins with that; it raises EngineError if the server does not answer."""

    @property
    def reloads(self) -> bool:
        """Whether this process sends weights to it, which one process must do for all."""

    @property
    def tolerance(self) -> float | None:
        """Mean distance from the policy's log-probs, in nats per token, up to which texts are accepted; None: any."""

    def bring(self, policy: str, write: Callable[[Path], None]) -> None:
        """Send the weights of a policy to the engine, if ``reloads``; raise EngineError if the engine does not load
        them. ``policy``: its name, which changes with the weights; ``write``: writes it into a new folder as
        ``from_pretrained`` reads it."""

    def prove(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Check that the engine has the policy's weights; raise EngineError if its log-probs differ, or cannot be
        parsed. ``ids``: W tokens of a text; ``log_probs``: the policy's log-probs of all but the first, at temperature
        1."""

    def complete(self, request: CompletionRequest) -> list[Completion]:
        """Return a completion of each prompt; raise EngineError if an answer does not match the request."""
