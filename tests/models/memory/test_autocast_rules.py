"""The casts of autocast on CUDA: those of torch's own tables, carried out on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flowmill.models.memory.autocast_rules import SINGLE, SINGLE_RESULT, CudaCasts
from flowmill.models.memory.tracing import PeakMemory

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


@pytest.mark.parametrize(
    ("macro", "names"), [("AT_FORALL_FP32", SINGLE), ("AT_FORALL_FP32_SET_OPT_DTYPE", SINGLE_RESULT)]
)
def test_the_tables_are_those_of_torch(macro: str, names: frozenset[str]) -> None:
    if not HEADER.is_file():
        pytest.skip("this build of torch has no headers")
    found = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", HEADER.read_text())
    assert found is not None
    assert set(re.findall(r"_\((\w+)", found[1])) == names


@pytest.mark.parametrize(
    ("compute", "on_cpu"),
    [
        (lambda x: functional.layer_norm(x, (8,)), torch.bfloat16),
        (lambda x: functional.rms_norm(x, (8,)), torch.bfloat16),
        (lambda x: functional.group_norm(x, 2), torch.bfloat16),
        (lambda x: x.softmax(-1), torch.bfloat16),
        (lambda x: functional.softmax(x, dim=-1), torch.bfloat16),
        (lambda x: x**2, torch.bfloat16),
        (lambda x: torch.rsqrt(x), torch.bfloat16),
        (lambda x: x.sum(-1), torch.bfloat16),
    ],
)
def test_what_cuda_computes_in_float32_is(compute: Callable[[Tensor], Tensor], on_cpu: torch.dtype) -> None:
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with CudaCasts():
        assert compute(x).dtype == on_cpu, "without autocast nothing is cast"
        with torch.autocast("cpu", torch.bfloat16):
            assert compute(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute(x).dtype == on_cpu


def test_matrix_products_stay_in_half_precision_and_what_is_asked_for_is_given() -> None:
    x = torch.ones(2, 8)
    with CudaCasts(), torch.autocast("cpu", torch.bfloat16):
        assert (x @ x.T).dtype == torch.bfloat16
        assert functional.linear(x, x).dtype == torch.bfloat16
        assert functional.gelu(x.bfloat16()).dtype == torch.bfloat16
        assert x.bfloat16().softmax(-1, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_what_is_joined_is_not_made_as_wide_first(join: Callable[[list[Tensor]], Tensor]) -> None:
    half, single = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        with PeakMemory() as before:
            join([half, single])
        with CudaCasts(), PeakMemory() as memory:
            assert join([half, single]).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
    assert (memory.peak, before.peak) == (2 * single.nbytes, 3 * single.nbytes)


def test_what_is_computed_again_in_the_backward_pass_is_cast_as_before() -> None:
    x, seen = torch.ones(2, 8, requires_grad=True), []

    def block(rows: Tensor) -> Tensor:
        seen.append(functional.layer_norm(rows.detach().bfloat16(), (8,)).dtype)
        return functional.layer_norm(rows.bfloat16(), (8,))

    with CudaCasts():
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(block, x, use_reentrant=False)
        y.square().mean().backward()
    assert seen == [torch.float32] * 2
    assert x.grad is not None
