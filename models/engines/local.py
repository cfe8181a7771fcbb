"""The policy in this process: one generation loop, a draw for each token, the same texts on any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.engines.base import Asked
from models.maths.generation import Completion, generate, reading_once


@dataclass(frozen=True)
class Local:
    """The default: needs no server, and has no options."""

    reloads = False
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
