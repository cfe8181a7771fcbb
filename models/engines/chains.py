"""The interface of engines that draw chains of denoisers: their requests and answers.
Legend: T steps, N returned states, ... latent dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowmill.configs.schema import RolloutSection

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sde:
    """The stochastic step of a run in the terms of SGLang's requests."""

    kind: str
    """``sde``, ``cps`` or ``ode``; the name in the table of kernels for those that SGLang lacks."""
    noise_level: float = 0.0
    squared: bool = False
    """Log-probs are without scale and constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The properties that all chains of a rollout share."""

    arguments: Mapping[str, Any]
    """Size, steps and guidance, by the arguments of the diffusers pipeline."""
    sde: Sde
    batch_size: int
    """Rows of the forwards that compute it."""
    shape: tuple[int, ...]
    """Shape of latents, (...)."""
    sigmas: Tensor
    """(T + 1,) float32 from near 1 to 0."""

    @property
    def steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRequest:
    """A chain to draw."""

    prompt: str
    seed: int
    """Seed of its noise."""
    stochastic: tuple[int, ...] = ()
    """The steps with noise."""
    trained: tuple[int, ...] = ()
    """Steps whose log-probs are returned."""
    states: tuple[int, ...]
    """States whose latents are returned, ascending; T is the final one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingChain:
    """A drawn chain."""

    latents: Tensor
    """(N, ...) float32."""
    states: tuple[int, ...]
    """The state of each, [N]."""
    sigmas: Tensor
    """(T + 1,) float32 noise levels."""
    log_probs: Tensor
    """(T,) float32; those of steps outside the request mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWeights:
    """The weights that chains are drawn with."""

    name: str
    """Name of a folder with them: other weights have another."""
    write: Callable[[Path], None]
    """Writes the denoisers into a new folder as a pipeline has them, adapters merged."""


class ChainServer(Protocol):
    """The server of an engine that draws for this process."""

    def chains(self, requests: Sequence[ChainRequest]) -> list[DenoisingChain]:
        """Return chains, after bringing the policy's weights and checking a chain of the proof. Raises EngineError if
        the server does not answer for a while, its chain is not the policy's, or an answer does not match its
        request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A rollout, as engines see it."""

    call: Call
    weights: PolicyWeights
    proof: ChainRequest
    """A chain without noise, of the first step alone."""
    prove: Callable[[str, DenoisingChain], None]
    """Checks a server's chain of the proof; raises EngineError if the policy's differs. The first argument is the
    server's address."""
    rank: int
    """The rank of this process."""


class ChainEngine(Protocol):
    """Draws chains. A method ``reach`` is called as that of ``flowmill.models.engines.base.Engine``."""

    @property
    def tolerance(self) -> float | None:
        """Relative distance of velocities from the policy's above which chains are refused; None: that of the dtype."""

    @property
    def log_prob_tolerance(self) -> float:
        """Mean distance of log-probs from the policy's, per latent, above which chains are refused."""

    def lacks(self, section: RolloutSection, sde: Sde) -> str | None:
        """Return why it cannot draw the chains of a rollout, and a remedy; None if it can."""

    def open(self, drawing: Drawing) -> ChainServer:
        """Return the server of this process; no request is sent yet."""
