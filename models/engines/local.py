"""Generation with the policy in this process: one draw per token, the same texts on any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flowmill.models.engines.base import CompletionRequest, Engine
from flowmill.models.maths.generation import Completion, generate, reading_once

#: Mean distance, in nats per token, between log-probs with a KV cache and those of a forward over whole rows, above
#: which rounding is not the cause. In float32 it is about 1e-6, in bfloat16 up to 0.03.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class LocalEngine:
    """The default: needs no server, and has no options."""

    reloads = False
    #: There is no check before it draws; its log-probs are checked against ``BOUNDS``.
    tolerance = None

    def bring(self, policy: str, write: Callable[[Path], None]) -> None:
        """Do nothing: it has the policy itself."""

    def prove(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Do nothing: it has the policy itself."""

    def complete(self, request: CompletionRequest) -> list[Completion]:
        """Return completions; the batch is padded to ``size`` with copies, so that the same kernels run."""
        missing = request.size - len(request.prompts)
        uniforms = request.uniforms

        def filled(position: int) -> torch.Tensor:
            assert uniforms is not None
            drawn = uniforms(position)
            return torch.cat([drawn, drawn[-1:].expand(missing)])

        completions = generate(
            reading_once(request.forward, request.distinct),
            [*request.prompts, *[request.prompts[-1]] * missing],
            request.sampling,
            width=request.width,
            uniforms=None if uniforms is None else filled,
            device=request.device,
            starts=[*request.starts, *[request.starts[-1]] * missing],
        )
        return completions[: len(request.prompts)]


def tolerance_of(engine: Engine, dtype: torch.dtype, device: torch.device) -> float | None:
    """Return the maximum mean distance of an engine's log-probs from the policy's, in nats per token. ``device``:
    device of the policy; its float32 products may use TF32, whose fraction has the bits of float16."""
    if not isinstance(engine, LocalEngine):
        return engine.tolerance
    less = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return BOUNDS[torch.float16 if dtype == torch.float32 and less else dtype]
