"""Token sequences split over ranks: Ulysses (arXiv 2309.14509), as diffusers' ``apply_context_parallel`` does it.

Each rank computes its part of the tokens; around attention the ranks exchange tokens for heads, so that each has all
tokens of some heads. A rank's gradients are those of its tokens; the sum over all ranks is the whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flowmill.configs.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSplit:
    """The ranks that share the tokens of each row."""

    mesh: DeviceMesh
    """Dimensions 'data', 'ring' (1) and 'ulysses': consecutive ranks share tokens."""

    @classmethod
    def of(cls, device: torch.device, *, world: int, degree: int) -> TokenSplit:
        """Return the split of ``world`` ranks into groups of ``degree``; all ranks must call this together."""
        shape = (world // degree, 1, degree)
        return cls(mesh=init_device_mesh(device.type, shape, mesh_dim_names=("data", "ring", "ulysses")))

    @contextmanager
    def over(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Let the ranks of a group compute rows of denoisers together inside the context; raise ConfigError if the
        tokens or heads of a denoiser cannot be split."""
        from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel

        config = self._config()
        plans = [token_plan(module, self.mesh["ulysses"].size()) for module in modules]
        for module, plan in zip(modules, plans, strict=True):
            _tell_attention(module, config)
            apply_context_parallel(module, config.context_parallel_config, plan)
        try:
            yield
        finally:
            for module, plan in zip(modules, plans, strict=True):
                _tell_attention(module, None)
                remove_context_parallel(module, plan)

    def _config(self) -> Any:
        # ``enable_parallelism`` requires an accelerator and cannot be undone.
        from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

        sizes = {"ring_degree": 1, "ulysses_degree": self.mesh["ulysses"].size()}
        config = ParallelConfig(context_parallel_config=ContextParallelConfig(**sizes, mesh=self.mesh))
        config.setup(dist.get_rank(), dist.get_world_size(), torch.device(self.mesh.device_type), mesh=self.mesh)
        return config


def token_plan(module: nn.Module, degree: int) -> Any:
    """Return diffusers' plan of where a denoiser's tokens are split and joined; it may be on the meta device. Raises
    ConfigError if diffusers has no plan, or the heads cannot be divided evenly."""
    plan, heads = getattr(module, "_cp_plan", None), module.config.get("num_attention_heads")  # type: ignore[union-attr, operator]
    if plan is None:
        raise ConfigError(
            f"execution.context_parallel is {degree}, but diffusers does not say how the tokens of a "
            f"{type(module).__name__} are split. Set it to 1."
        )
    if heads is not None and heads % degree:
        raise ConfigError(
            f"execution.context_parallel is {degree}, but the denoiser has {heads} attention heads, which that does "
            "not divide."
        )
    return plan


def _tell_attention(module: nn.Module, config: Any) -> None:
    for layer in module.modules():
        processor = getattr(layer, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = config  # type: ignore[union-attr]
