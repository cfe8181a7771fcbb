"""Counts of the work of models: their FLOPs by hand, the time of forwards and backwards, and that nothing changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flowmill.configs.schema import RunConfig
from flowmill.models.policies import compute_meter
from flowmill.models.policies.compute_meter import Meter, forward_flops
from flowmill.tasks.metrics.speed import epoch_speeds, in_words
from flowmill.tasks.metrics.tracked import epoch_content
from flowmill.tasks.runtime.host import ModelHost
from tests.support.inside import prepare, run_epoch

Make = Callable[..., RunConfig]


class Config(dict[str, Any]):
    pass


class Perceptron(nn.Module):
    """Two layers, made from a config as models of diffusers are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.config = Config(width=width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @classmethod
    def from_config(cls, config: Config) -> Perceptron:
        return cls(**config)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows).relu())


@pytest.mark.parametrize(("adapters", "backward"), [(False, 2), (True, 1)])
def test_flops_are_those_by_hand(adapters: bool, backward: int) -> None:
    module, rows = Perceptron(8), torch.ones(5, 8)
    by_hand = 2 * 5 * (8 * 32 + 32 * 8)
    meter = Meter(adapters=adapters)
    meter.watch({"m": module})
    with torch.no_grad():
        module(rows)
    assert meter.take().flops == by_hand
    loss = module(rows).sum()
    with meter.backward():
        loss.backward()
    assert meter.take().flops == (1 + backward) * by_hand
    assert meter.take() == type(meter.take())(0.0, 0.0)


def test_ranks_that_share_tokens_count_their_part() -> None:
    meter, module = Meter(adapters=False, share=0.25), Perceptron(8)
    meter.watch({"m": module})
    module(torch.ones(5, 8))
    assert meter.take().flops == 2 * 5 * 2 * 8 * 32 / 4


def test_time_in_the_model_is_counted_and_no_other() -> None:
    meter, module = Meter(adapters=False), Perceptron(8)
    module.first.register_forward_hook(lambda *_: time.sleep(0.2))
    meter.watch({"m": module})
    time.sleep(0.3)
    module(torch.ones(5, 8))
    with meter.timed():
        time.sleep(0.1)
    assert 0.3 <= meter.take().seconds < 0.6


def test_a_model_that_cannot_be_counted_is_not() -> None:
    meter, module = Meter(adapters=False), nn.Linear(3, 3)
    meter.watch({"m": module})
    module(torch.ones(1, 3))
    found = meter.take()
    assert found.flops is None
    assert found.seconds > 0


def test_a_model_in_half_precision_is_counted_as_in_single() -> None:
    rows = torch.ones(5, 8, dtype=torch.bfloat16)
    assert forward_flops(Perceptron(8).bfloat16(), (rows,), {}) == 2 * 5 * (8 * 32 + 32 * 8)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307.4e12),
        (None, None),
    ],
)
def test_peaks_are_those_of_the_device_s_own_name(
    name: str | None, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_meter, "device_name", lambda device: name)
    assert compute_meter.peak_flops(torch.device("cuda:0"), torch.bfloat16) == peak
    assert compute_meter.peak_flops(torch.device("cuda:0"), torch.float32) is None


def test_models_of_one_kind_are_counted_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = Perceptron.from_config
    monkeypatch.setattr(Perceptron, "from_config", lambda config: (made.append(config["width"]), make(config))[1])
    monkeypatch.setattr(compute_meter, "_COUNTED", {})
    counts = [
        forward_flops(Perceptron(width), (torch.ones(rows, width),), {})
        for width, rows in ((6, 2), (6, 2), (6, 4), (7, 2))
    ]
    assert made == [6, 6, 7]
    assert counts == [2 * rows * 2 * 4 * width**2 for width, rows in ((6, 2), (6, 2), (6, 4), (7, 2))]


class ByValue(Perceptron):
    """Does what values decide, which shapes do not tell."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) if float(rows.sum()) > 0 else rows


def test_a_model_that_looks_at_values_is_not_counted() -> None:
    assert forward_flops(ByValue(8), (torch.ones(5, 8),), {}) is None


def test_speed_is_told_and_measuring_changes_nothing(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    content = epoch_content(context.chain, 1)
    assert content is not None
    figures = {point.key: point.value for point in content.points}
    for stage in ("rollout", "optimize"):
        assert 0 < figures[f"time/{stage}_outside_model"] < 1
        assert figures[f"time/{stage}_tflops_per_s"] > 0
        assert f"time/{stage}_mfu" not in figures  # of a CPU no peak is known
    other = prepare(make_config("run.name=unmeasured", f"store.root={context.store.root.uri}-2"))
    monkeypatch.setattr(Meter, "watch", lambda self, modules: None)
    run_epoch(other, 1)
    for stage in ("rollout", "optimize"):
        made = [each.store.require(each.chain.require(1, stage).ref).digest for each in (context, other)]
        assert made[0] == made[1]


def test_a_device_of_known_peak_has_an_mfu(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"model_seconds": 0.0, "model_flops": 3e9, "peak_flops": 1e12}
    monkeypatch.setattr(ModelHost, "computed", lambda self: measured)
    context = prepare(make_config())
    run_epoch(context, 1)
    speed = epoch_speeds(context.chain, 1)["rollout"]
    assert speed["mfu"] == pytest.approx(speed["tflops_per_s"])
    assert speed["outside_model"] == 1
    text = in_words({"samples_per_s": 12.345, "outside_model": 0.021, "tflops_per_s": 401.2, "mfu": 0.4054})
    assert text == "12.3 samples/s, 2.1% outside the model, 401 TFLOP/s, MFU 40.5%"
