"""Bytes that ranks exchange while training, counted, beside what docs/gpus.md says of them.

python -m tools.benchmarks.traffic
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.policies.diffusion import DiffusionSettings, TrainableDenoiser
from flowmill.models.policies.flux1 import Flux1
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.models.weights.context_parallel import TokenSplit
from flowmill.models.weights.lora import LoraSpec
from flowmill.models.weights.sharding import Sharding
from flowmill.tasks.runtime.ranks import Ranks

RANKS = (2, 4)
#: Ranks that share tokens.
_DEGREE = 2
STRATEGIES = ("ddp", "fsdp", "groups", "ulysses")
#: Ranks of a group that holds all weights.
_GROUP = 2
_GATHER, _SCATTER, _REDUCE, _ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
_OPERATIONS = {
    "_allgather_base_": _GATHER,
    "_reduce_scatter_base_": _SCATTER,
    "allreduce_": _REDUCE,
    "all_to_all_single": _ALL,
}


class Traffic(TorchDispatchMode):
    """Counts the bytes of whole tensors that collectives put together or add up."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carry out an operation and note what it exchanges."""
        kind = _OPERATIONS.get(func._schema.name.rpartition("::")[2])
        if kind is not None:
            # The gathered tensor comes first, the one that is scattered second; all-reduce takes a list.
            whole = args[1] if kind == _SCATTER else args[0]
            for tensor in [whole] if isinstance(whole, Tensor) else whole:
                self.bytes[kind] += tensor.numel() * tensor.element_size()
        return func(*args, **(kwargs or {}))


def expected(strategy: str, *, frozen: int, trained: int, tokens: int, attentions: int) -> dict[str, int]:
    """Return the bytes an update of one micro-batch exchanges: whole tensors, or what one rank sends of its tokens.

    Args:
        strategy: ddp, fsdp, groups (fsdp in groups of two) or ulysses (with ddp).
        frozen: bytes of frozen weights.
        trained: bytes of trained weights, and of their gradients.
        tokens: bytes of the queries of all of a rank's tokens in one layer.
        attentions: attention layers.
    """
    if strategy == "ddp":
        return {_REDUCE: trained}
    if strategy == "ulysses":
        # Queries, keys, values and results, forward and backward; gradients of rows that are shared are added up.
        return {_REDUCE: trained, _ALL: 2 * 4 * tokens * attentions}
    # Every block is put together for the forward and again for the backward pass.
    found = {_GATHER: 2 * (frozen + trained), _SCATTER: trained}
    # Groups add up what each of their ranks has of the gradients.
    return {**found, _REDUCE: trained // _GROUP} if strategy == "groups" else found


def measure(strategy: str, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes counted and expected of one update on this rank's group."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    settings = DiffusionSettings(height=64, width=64, dtype=torch.bfloat16, empty=strategy in ("fsdp", "groups"))
    policy = Flux1.load(folder, settings, frozenset(Part), {})
    trainable = TrainableDenoiser(policy, LoraSpec(rank=4, alpha=8, targets=policy.lora_targets), seed=0)
    if strategy == "fsdp":
        trainable.shard(Sharding(mesh=init_device_mesh("cpu", (ranks.world,))))
    if strategy == "groups":
        trainable.shard(Sharding.over(torch.device("cpu"), world=ranks.world, size=_GROUP, offload=False))
    rows = policy.encode(["a photo"])
    latents = policy.initial_latents([torch.Generator().manual_seed(0)])
    weights = [p for module in policy.denoisers.values() for p in module.parameters()]
    sizes = {
        kind: sum(p.numel() * p.element_size() for p in weights if p.requires_grad is kind) for kind in (True, False)
    }
    split = TokenSplit.of(torch.device("cpu"), world=ranks.world, degree=_DEGREE) if strategy == "ulysses" else None
    with Traffic() as traffic:
        with split.over(trainable.modules()) if split else nullcontext():
            velocity = policy.velocity(latents, torch.tensor([0.5]), Conditioning(rows))
            velocity.square().mean().backward()  # type: ignore[no-untyped-call]
        ranks.sum_gradients(trainable.parameters())
    # Which parameters have a gradient at all is asked first, a byte each.
    asked = len(trainable.parameters()) if strategy in ("ddp", "ulysses") else 0
    counted = {kind: count - (asked if kind == _REDUCE else 0) for kind, count in traffic.bytes.items()}
    config = policy.pipeline.transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    own = (latents.shape[1] + rows["prompt_embeds"].shape[1]) // _DEGREE
    layers = config.num_layers + config.num_single_layers
    said = expected(strategy, frozen=sizes[False], trained=sizes[True], tokens=own * width * 2, attentions=layers)
    return counted, said


def main() -> None:
    """Start ranks of every number, or be one of them."""
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            build_tiny("flux1").save_pretrained(folder)
            for count in RANKS:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    where = ["--master-addr=127.0.0.1", f"--master-port={probe.getsockname()[1]}"]
                command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", *where]
                subprocess.run([*command, "-m", "tools.benchmarks.traffic", folder], check=True)
        return
    dist.init_process_group("gloo")
    several = dist.get_world_size() > _GROUP
    for strategy in (each for each in STRATEGIES if several or each != "groups"):
        counted, said = measure(strategy, Path(sys.argv[1]))
        if dist.get_rank() == 0:
            for kind, count in sorted(said.items()):
                found = counted.get(kind, 0)
                sys.stdout.write(
                    f"{strategy} x{dist.get_world_size()}: {kind} {found:,} bytes counted, {count:,} expected, "
                    f"ratio {found / count:.3f}\n"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
