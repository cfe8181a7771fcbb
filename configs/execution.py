"""The section ``execution``: devices, processes, batch sizes, retries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from flowmill.configs.base import Component, Section


class ExecutionSection(Section):
    """Execution settings. Only ``ahead`` changes results beyond float rounding."""

    removed: ClassVar[Mapping[str, str]] = {
        "resident_epochs": "Processes stay for the whole run; runs continue (--advance) with new ones.",
        "render_device": "The image model of render is on the device of its process, and leaves it after the stage.",
        "keep_renderer": "The image model of render leaves an accelerator after the stage.",
        "fused_adamw": "Remove it: optimizer steps take a small part of an epoch.",
    }

    device: str = "auto"
    """Torch device, or auto: CUDA when there is one."""
    processes: int = Field(1, ge=1)
    """Processes that hold models; several run under torchrun for the whole run and share every stage."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Placement of the weights on several processes: ddp keeps a full copy on each, fsdp shards every block while
    training (FSDP2)."""
    fsdp_size: int | None = Field(None, ge=2)
    """With fsdp: number of adjacent processes that shard one copy of the weights; each such group holds a copy (HSDP).
    It must divide the number of processes. One group of all processes when absent."""
    offload: bool | Literal["parameters", "optimizer"] = False
    """Keep parts in host memory, which saves device memory and costs time. With fsdp: parameters and gradients, with
    the optimizer's moments on the device (parameters) or also on the host (true). With every strategy: the moments
    alone, except during the optimizer step (optimizer)."""
    sampling: Literal["whole", "spread"] = "whole"
    """With fsdp: gather the whole weights on every rank for sampling, or keep them sharded, which takes less memory and
    more communication; all ranks then run every forward together."""
    context_parallel: int = Field(1, ge=1)
    """Processes that share the tokens of each row while training (Ulysses), for long clips; it must divide the number
    of processes."""
    nodes: int = Field(1, ge=1)
    """Number of machines, each with `processes` processes; they share the store."""
    launcher: Component = Component(name="local")
    """How the processes are started: local, or agents for several machines."""
    modules: tuple[str, ...] = ()
    """Folders of your own modules, searched after the working directory. The folder of the config is added if a module
    of an import string lies there."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Python source of further modules by name, as `flowmill.train` carries what a script or a notebook defines."""
    stall_s: float = Field(1800.0, gt=0)
    """Seconds without progress after which a process counts as hanging and the run stops."""
    deterministic: bool = False
    """Use only deterministic kernels, which are slower: then resuming on an accelerator is bit for bit equal too. On
    the CPU it always is."""
    threads: int = Field(1, ge=1)
    """Torch threads per process on CPU."""
    rollout_batch_size: int = Field(16, ge=1)
    """Rows per forward in rollouts and evaluation; the last batch is padded to it."""
    decode_batch_size: int | None = Field(None, ge=1)
    """Images or clips decoded at a time, the last batch padded; rollout_batch_size when absent."""
    micro_batch_size: int = Field(16, ge=1)
    """Maximum (sample, step) rows per training forward. An update is split into as few micro-batches as possible, of
    similar sizes, each padded to a multiple of a sixteenth of this."""
    encode_batch_size: int = Field(8, ge=1)
    """Prompts per text encoder forward; the last batch is padded to it."""
    render_rows: int = Field(8, ge=1)
    """Images per forward of the image model (`render`); the last batch is padded to it."""
    ahead: int = Field(0, ge=0)
    """Number of epochs that rollouts are ahead of training: epoch n is rolled out with policy n - 1 - ahead, regardless
    of timing. With a runner that uses other processes, rollouts and training then run concurrently."""
    runner: Component = Component(name="threads")
    """Executor of the shards of encode, rollout, score, evaluate and judge: threads (this process and its ranks), or
    the workers of a dask or ray cluster."""
    score_workers: int | None = Field(None, ge=1)
    """With runner threads: number of shards scored at a time, by rewards that use no accelerator; the number of free
    cores when absent. Slow rewards are scored in processes, reward servers are called from threads; 1 is a thread."""
    checkpoint_every: int = Field(0, ge=0)
    """Commit an optimizer checkpoint every this many updates within an epoch; 0: only at the end of the epoch."""
    retries: int = Field(2, ge=0)
    """Retries of a shard on transient errors."""
    retry_delay_s: float = Field(5.0, ge=0)
    """First retry delay in seconds; doubles with each retry."""

    @property
    def ranks(self) -> int:
        """Processes on all machines together."""
        return self.processes * self.nodes

    @property
    def parameters_in_host(self) -> bool:
        """True if parameters and gradients are kept in host memory."""
        return self.offload in (True, "parameters")

    @property
    def moments_in_host(self) -> bool:
        """True if the optimizer's moments are kept in host memory between optimizer steps."""
        return self.offload in (True, "optimizer")

    @property
    def holders(self) -> int:
        """Processes that share one copy of the weights; 1 if each holds a full copy."""
        return (self.fsdp_size or self.ranks) if self.strategy == "fsdp" else 1
