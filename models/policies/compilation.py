"""Compiled denoisers: block by block, so that equal blocks are compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flowmill.models.weights.sharding import units


def compile_blocks(module: Any, blocks: Sequence[str]) -> None:
    """Compile a denoiser's blocks in place: those that diffusers declares as repeated, else those in the named lists.
    Compiled code is stored in torch's disk cache (``TORCHINDUCTOR_CACHE_DIR``) for later processes."""
    # A block has a graph with gradient and one without, with and without adapters, and some blocks differ.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if module._repeated_blocks:
        module.compile_repeated_blocks()
        return
    for block in units(module, blocks):
        block.compile()
