"""Which device threads work on, and what of it is known."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flowmill.models.devices import as_here, device_name, make_current, moved


@pytest.mark.parametrize(("index", "chosen"), [(3, [3]), (0, [])])
def test_a_thread_works_on_the_device_of_who_started_it(
    index: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: index)
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    with ThreadPoolExecutor(1, initializer=as_here()) as pool:
        threads = pool.submit(torch.get_num_threads).result()
    assert found == chosen, "the first is every thread's, and a CPU's run makes no room on it"
    assert threads == torch.get_num_threads()


def test_the_cpu_is_nobody_s_choice_and_what_is_moved_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "set_device_index", pytest.fail)
    cpu, rows = torch.device("cpu"), torch.ones(2)
    make_current(cpu)
    assert moved(rows, cpu) is rows
    assert device_name(cpu) is None
