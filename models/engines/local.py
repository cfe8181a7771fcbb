"""The policy in this process: one generation loop, a draw for each token, the same texts on any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.engines.base import Asked, Engine
from models.maths.generation import Completion, generate, reading_once

#: Mean distance, in nats per token, of log-probs with a KV cache from those of a forward over whole rows, above which
#: something else than rounding is between them. In float32 it is about 1e-6, in bfloat16 up to 0.03.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class Local:
    """The default: needs no server, and has no options."""

    reloads = False
    #: It has nothing to prove before it draws; what it drew is held to ``BOUNDS``.
    tolerance = None

    def bring(self, policy: str, write: Callable[[Path], None]) -> None:
        """Nothing: it has the policy itself."""

    def prove(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Nothing: it has the policy itself."""

    def complete(self, asked: Asked) -> list[Completion]:
        """Return completions; the batch is filled up to its size with copies, so that kernels are the same."""
        missing = asked.size - len(asked.prompts)
        uniforms = asked.uniforms

        def filled(position: int) -> torch.Tensor:
            assert uniforms is not None
            drawn = uniforms(position)
            return torch.cat([drawn, drawn[-1:].expand(missing)])

        found = generate(
            reading_once(asked.forward, asked.distinct),
            [*asked.prompts, *[asked.prompts[-1]] * missing],
            asked.sampling,
            width=asked.width,
            uniforms=None if uniforms is None else filled,
            device=asked.device,
        )
        return found[: len(asked.prompts)]


def tolerance_of(engine: Engine, dtype: torch.dtype, device: torch.device) -> float | None:
    """Return the mean distance from the policy's log-probs, in nats per token, with which texts of an engine are taken.

    Args:
        engine: what drew them; None is returned where it has no bound.
        dtype: that the policy computes in.
        device: where it is; there float32 may be multiplied in less (TF32), whose fraction has the bits of float16.
    """
    if not isinstance(engine, Local):
        return engine.tolerance
    less = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return BOUNDS[torch.float16 if dtype == torch.float32 and less else dtype]
