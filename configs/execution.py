"""The section ``execution``: devices, processes, batch sizes, retries."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.base import Component, Section


class ExecutionSection(Section):
    """Execution settings. Nothing here but ``ahead`` changes results beyond float rounding."""

    device: str = "auto"
    """Torch device, or auto: CUDA when there is one."""
    processes: int = Field(1, ge=1)
    """Processes that hold models; more than one stay under torchrun for the whole run and share every stage."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How several processes hold the weights: each whole, or each a part of every block while training (FSDP2)."""
    fsdp_size: int | None = Field(None, ge=2)
    """With fsdp: so many processes next to each other hold the weights together, and each group of them holds them
    (HSDP); it divides their number. All hold them together when absent."""
    offload: bool | Literal["parameters", "optimizer"] = False
    """Parts kept in host memory, which saves device memory and costs time: with fsdp parameters and gradients, and the
    optimizer's moments stay on the device (parameters) or are there too (true); with every strategy the moments alone,
    but while the optimizer steps (optimizer)."""
    sampling: Literal["whole", "spread"] = "whole"
    """With fsdp: weights are made whole on every rank to sample, or stay spread, which takes less memory and more
    traffic; the ranks then make every forward together."""
    context_parallel: int = Field(1, ge=1)
    """Processes that share the tokens of each row while training (Ulysses), for long clips; it divides their number."""
    nodes: int = Field(1, ge=1)
    """Machines, each with so many processes; they share the store."""
    launcher: Component = Component(name="local")
    """How the processes are started: local, or agents for several machines."""
    resident_epochs: int | None = Field(None, ge=1)
    """Restart the processes after so many epochs; they stay for the whole run when absent."""
    stall_s: float = Field(1800.0, gt=0)
    """Seconds after which a process that is silent, or does not move on, is said to hang and the run stops."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time, slower: then resuming on an accelerator is bit for bit too.
    On the CPU all do."""
    threads: int = Field(1, ge=1)
    """Torch threads per process on CPU."""
    rollout_batch_size: int = Field(16, ge=1)
    """Rows per forward in rollouts and evaluation; the last batch is padded to it."""
    decode_batch_size: int | None = Field(None, ge=1)
    """Images or clips decoded at a time, the last ones padded; as many as are sampled when absent."""
    micro_batch_size: int = Field(16, ge=1)
    """(sample, step) rows per training forward at most. An update is cut into as few as can be, of like sizes, each
    padded to a multiple of a sixteenth of this."""
    fused_adamw: bool = False
    """One kernel for all of an optimizer step: faster with many parameters, equal to float rounding."""
    encode_batch_size: int = Field(8, ge=1)
    """Prompts per text encoder forward; the last batch is padded to it."""
    render_rows: int = Field(8, ge=1)
    """Images per forward of the model that draws texts (`render`); the last batch is padded to it."""
    render_device: str | None = None
    """Torch device of that model; as `device` when absent."""
    keep_renderer: bool = False
    """That model stays loaded while the language model samples and trains, which takes memory and spares reading it."""
    ahead: int = Field(0, ge=0)
    """Epochs that are rolled out before those ahead of them are trained: epoch n with policy n - 1 - ahead, whoever is
    fast or slow. With a runner that has other processes, rollouts and training then go on at the same time."""
    runner: Component = Component(name="threads")
    """Who takes the shards of encode, rollout, score, evaluate and judge: threads (this process and its ranks), or the
    workers of a dask or ray cluster."""
    score_workers: int | None = Field(None, ge=1)
    """With runner threads: how many score shards at a time, with rewards that take no accelerator; as many as cores are
    left when absent. They are processes where scoring takes long, and threads for servers; 1 is a thread."""
    checkpoint_every: int = Field(0, ge=0)
    """Commit an optimizer checkpoint every so many updates within an epoch; 0 only at its end."""
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
        """True where parameters and gradients lie in host memory."""
        return self.offload in (True, "parameters")

    @property
    def moments_in_host(self) -> bool:
        """True where the optimizer's moments lie in host memory while nothing is stepped."""
        return self.offload in (True, "optimizer")

    @property
    def holders(self) -> int:
        """Processes that hold the weights together; 1 where each holds them whole."""
        return (self.fsdp_size or self.ranks) if self.strategy == "fsdp" else 1
