"""The one command for a first GPU, on a simulated device; and that device itself, as strict as a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tools.accelerator import missing
from tools.gpu import families, memory
from tools.gpu.lines import Line, Lines, between, equal

STRICT = """
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from flowmill.models.devices import as_here, make_current
from flowmill.models.policies.compute_meter import Meter
from tools.accelerator import simulated

counts = simulated(Path(sys.argv[1]))
there, here = torch.ones(4, 4, device="sim:0"), torch.ones(4, 4)


def refused(work, words):
    try:
        work()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


refused(lambda: there + here, "on the same device")
refused(lambda: there + torch.ones(4, 4, device="sim:1"), "on the same device")
refused(lambda: there.double(), "no float64")
attend, rows = torch.nn.functional.scaled_dot_product_attention, torch.rand(1, 2, 256, 8)
refused(lambda: attend(rows.to("sim:0"), *[rows.to("sim:1")] * 2), "the same device")
refused(lambda: attend(*[rows.to("sim:0")] * 3, torch.zeros(256, 256)), "on the same device")
with torch.autocast("sim", torch.bfloat16):
    assert (there @ there).dtype == torch.bfloat16
    assert (there @ there).softmax(-1).dtype == torch.float32
    assert torch.nn.functional.layer_norm(there.bfloat16(), (4,)).dtype == torch.float32
grown = rows.to("sim:0").requires_grad_()
torch.accelerator.reset_peak_memory_stats()
attend(grown, grown, grown).square().sum().backward()
assert torch.accelerator.max_memory_allocated() < 16 * rows.nbytes, "scores alone are twice that"
start = rows.clone().requires_grad_()
attend(start, start, start).square().sum().backward()
assert torch.allclose(grown.grad.cpu(), start.grad)
counts.forget()
here.pin_memory().to("sim:0", non_blocking=True)
assert not counts.waits()
there.sum().item()
here.to("sim:0")
assert sum(counts.waits().values()) == 2, counts.waits()
make_current(torch.device("sim:1"))
with ThreadPoolExecutor(1, initializer=as_here()) as pool:
    assert pool.submit(torch.accelerator.current_device_index).result() == 1
meter = Meter(adapters=False, device=torch.device("sim:1"))
with meter.timed():
    time.sleep(0.1)
assert 0.1 <= meter.take().seconds < 1
"""


def test_a_line_says_whether_what_was_measured_is_what_was_predicted() -> None:
    lines = Lines([between("memory", 100.0, 109.0), equal("waits", 0.0, 0.0), Line(label="seconds", measured=1.5)])
    assert lines.good
    assert lines[0].ratio == pytest.approx(1.09)
    lines += [between("memory", 100.0, 111.0)]
    assert not lines.good
    with lines.told("a part"):
        raise RuntimeError("no | kernel\nfor it")
    assert lines.markdown().splitlines()[2:] == [
        "| memory | 100 | 109 | 1.09 | yes |",
        "| waits | 0 | 0 |  | yes |",
        "| seconds |  | 1.5 |  |  |",
        "| memory | 100 | 111 | 1.11 | **no** |",
        "| a part |  | RuntimeError: no / kernel |  | **no** |",
    ]
    assert json.loads(json.dumps(lines.as_data()))[3]["ok"] is False


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the device is built, once."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    return tmp_path_factory.mktemp("cache")


def run_python(cache: Path, *arguments: str) -> None:
    said = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert said.returncode == 0, said.stdout + said.stderr[-2000:]


def lines_of(cache: Path, *given: str) -> list[dict[str, Any]]:
    """Return what the one command found, all of it as it must be."""
    found = cache / "gpu.json"
    run_python(cache, "-m", "tools.gpu", *given, "--simulated", "--json", str(found))
    lines: list[dict[str, Any]] = json.loads(found.read_text())["lines"]
    assert {line["ok"] for line in lines} == {True, None}
    return lines


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.xdist_group("simulated")
def test_the_simulated_device_is_as_strict_as_a_gpu(cache: Path) -> None:
    run_python(cache, "-c", STRICT, str(cache / "flowmill" / f"simulated-{torch.__version__}"))


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.xdist_group("simulated")
def test_the_one_command_finds_all_as_it_must_be(cache: Path) -> None:
    lines = lines_of(cache, "--short")
    took = [line["ratio"] for line in lines if line["label"].endswith("forward and backward")]
    assert len(took) == 2
    assert all(0.99 < ratio < 1.01 for ratio in took)
    drawn = [line["label"].partition(":")[0] for line in lines if "the pipeline's" in line["label"]]
    assert drawn == list(families.SHORT)


@pytest.mark.campaign
@pytest.mark.xdist_group("simulated")
def test_what_is_traced_is_what_every_family_takes(cache: Path) -> None:
    lines = lines_of(cache, "memory")
    for preset in memory.every_family():
        of_it = [line for line in lines if line["label"].startswith((f"{preset}, ", f"{preset}: "))]
        took = {line["label"].rpartition("MB of ")[2]: line["ratio"] for line in of_it if "MB of " in line["label"]}
        assert len(took) >= 3, preset
        assert all(0.9 < ratio < 1.1 for ratio in took.values()), took
