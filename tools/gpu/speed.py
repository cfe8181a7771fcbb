"""Seconds of rows, eager, compiled and with other attention, and what of the device's peak they reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from flowmill.models.policies.attention import set_attention
from flowmill.models.policies.compute_meter import Meter, peak_flops
from flowmill.models.policies.pipeline import compile_blocks
from tools.gpu.lines import Line, Lines, equal
from tools.gpu.memory import Row, config_of, some_blocks, traces_of

#: Attention that needs nothing but torch.
ATTENTION = ("native", "_native_flash", "_native_efficient", "_native_cudnn")
_PRESET = "sd35_medium"
_REPEATS = 5


def measure(device: torch.device, lines: Lines, *, short: bool) -> None:
    """Add what a row of SD3.5 medium takes; where the device is slow, of two blocks alone."""
    with lines.told("speed"):
        lines += _plain(device, short=short)
    if short:
        return
    for attention in ATTENTION:
        with lines.told(f"{_PRESET}, attention {attention}"):
            row = Timed(device, blocks=None)
            for module in row.policy.denoisers.values():
                set_attention(module, attention)
            seconds = row.seconds(row.train)
            lines.append(Line(label=f"{_PRESET}, attention {attention}: seconds of a training row", measured=seconds))
    with lines.told(f"{_PRESET}, compiled"):
        lines += _compiled(device)


class Timed(Row):
    """One row of the model, and how long it takes."""

    def __init__(self, device: torch.device, *, blocks: int | None, short: bool = False) -> None:
        """Make the model, and the row."""
        traced = traces_of(config_of(_PRESET, short=short))
        super().__init__(traced, some_blocks(traced, blocks), device)

    def seconds(self, work: Callable[[], None], repeats: int = _REPEATS) -> float:
        """Return the least seconds of some work, after it was done once."""
        work()
        least = float("inf")
        for _ in range(repeats):
            torch.accelerator.synchronize(self._device)
            begun = time.perf_counter()
            work()
            torch.accelerator.synchronize(self._device)
            least = min(least, time.perf_counter() - begun)
        return least

    def meter(self) -> Meter:
        """Return what counts the FLOPs of the denoisers from now on."""
        meter = Meter(adapters=True, device=self._device)
        meter.watch(self.policy.denoisers)
        return meter


def _plain(device: torch.device, *, short: bool) -> Iterator[Line]:
    row = Timed(device, blocks=2 if short else None, short=short)
    repeats = 1 if short else _REPEATS
    seconds = row.seconds(row.sample, repeats)
    meter = row.meter()
    row.sample()
    done = meter.take()
    size = "two blocks of " if short else ""
    yield Line(label=f"{size}{_PRESET}: seconds of a sampling row", measured=seconds)
    yield Line(
        label=f"{size}{_PRESET}: seconds of a sampling row, by the device's events",
        predicted=seconds,
        measured=done.seconds,
        ok=done.seconds > 0,
    )
    assert done.flops is not None, "FLOPs of a model in half precision are not counted"
    yield Line(label=f"{size}{_PRESET}: TFLOP/s while sampling", measured=done.flops / seconds / 1e12, ok=True)
    peak = peak_flops(device, torch.bfloat16)
    if peak is not None:
        yield Line(label=f"{_PRESET}: share of the peak", measured=done.flops / seconds / peak, ok=True)
    yield Line(label=f"{size}{_PRESET}: seconds of a training row", measured=row.seconds(row.train, repeats))


def _compiled(device: torch.device) -> Iterator[Line]:
    row = Timed(device, blocks=None)
    for module in row.policy.denoisers.values():
        compile_blocks(module, row.policy.blocks)
    begun = time.perf_counter()
    row.sample()
    row.train()
    yield Line(label=f"{_PRESET}, compiled: seconds until it computes", measured=time.perf_counter() - begun)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    sampled, trained = row.seconds(row.sample), row.seconds(row.train)
    after = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    yield Line(label=f"{_PRESET}, compiled: seconds of a sampling row", measured=sampled)
    yield Line(label=f"{_PRESET}, compiled: seconds of a training row", measured=trained)
    yield equal(f"{_PRESET}, compiled: graphs made while it computes", 0.0, float(after - before))
