"""The interface of engines that draw chains of denoisers: their requests and answers.
Legend: T steps, N returned states, ... latent dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from configs.schema import RolloutSection

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
    settings: Mapping[str, Any]
    """Everything in the config that changes a chain, as plain JSON values."""
    sde: Sde
    batch_size: int
    """Rows of the forwards that compute it."""
    shape: tuple[int, ...]
    """Shape of latents, (...)."""
    sigmas: Tensor
    """(T + 1,) float32 from about 1 to 0."""

    @property
    def steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A chain to draw."""

    prompt: str
    initial: int
    """Seed of the initial noise."""
    own: int | None = None
    """Seed of a sample's own part of it, if there is one."""
    noise: Mapping[int, int] = field(default_factory=dict)
    """Stochastic step -> seed of its noise."""
    trained: tuple[int, ...] = ()
    """Steps whose log-probs are wanted."""
    states: tuple[int, ...]
    """States whose latents are wanted, ascending; T is the final one."""

    @property
    def stochastic(self) -> tuple[int, ...]:
        """The steps with noise."""
        return tuple(self.noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A drawn chain."""

    latents: Tensor
    """(N, ...) float32."""
    states: tuple[int, ...]
    """The state of each, [N]."""
    sigmas: Tensor
    """(T + 1,) float32 noise levels."""
    log_probs: Tensor
    """(T,) float32; those of steps that were not asked for mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWeights:
    """The weights that chains are drawn with."""

    name: str
    """Digest of the trained tensors, see ``chain_wire.TensorsDigest``; ``BASE`` if the base model itself draws."""
    parts: Callable[[int], Iterator[Mapping[str, Tensor]]]
    """Bytes -> the trained tensors by name, in parts of about so many bytes; none of the base model itself."""
    write: Callable[[Path], None]
    """Writes the denoisers into a new folder as a pipeline has them, adapters merged."""


#: Name of the weights of the base model itself.
BASE = "base"


class ChainServer(Protocol):
    """One server of an engine."""

    @property
    def url(self) -> str:
        """Its address, for messages."""

    def ready(self) -> None:
        """Bring the policy's weights to the server if it lacks them, and check a chain of the proof. Raises
        PassingError if it does not answer; EngineError if its chain is not the policy's."""

    def chains(self, wanted: Sequence[Wanted]) -> list[Chain]:
        """Return chains; raise PassingError if it does not answer, or lost its weights; EngineError if an answer does
        not match its request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A rollout, as engines see it."""

    call: Call
    weights: PolicyWeights
    proof: Wanted
    """A chain without noise, of the first step alone."""
    prove: Callable[[str, Chain], None]
    """Checks a server's chain of the proof; raises EngineError if the policy's differs. The first argument is the
    server's address."""


class ChainEngine(Protocol):
    """Draws chains."""

    @property
    def tolerance(self) -> float | None:
        """Relative distance of velocities from the policy's above which chains are refused; None: that of the dtype."""

    @property
    def log_prob_tolerance(self) -> float:
        """Mean distance of log-probs from the policy's, per latent, above which chains are refused."""

    @property
    def patience_s(self) -> float:
        """Seconds of failures of all servers, which are retried, after which the run stops."""

    @property
    def draws_alike(self) -> bool:
        """Whether it draws the noise that this process draws from the same seeds."""

    def lacks(self, section: RolloutSection, sde: Sde) -> str | None:
        """Return why it cannot draw the chains of a rollout, and a remedy; None if it can."""

    def open(self, drawing: Drawing) -> Sequence[ChainServer]:
        """Return the servers of a rollout; no request is sent yet."""
