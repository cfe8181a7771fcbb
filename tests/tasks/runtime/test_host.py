"""Models and weights that a process holds in memory: on which device, and until when; how much that was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from flowmill.configs.errors import ConfigError, OutOfMemoryError
from flowmill.models.devices import chosen_device
from flowmill.models.policies.parts import Part
from flowmill.models.rewards.base import Needs
from flowmill.tasks.execution.rank_executor import RankExecutor
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.runtime.devices import allocator_advice
from flowmill.tasks.runtime.hardware_info import computing_facts
from flowmill.tasks.runtime.process_memory import process_peak
from tests.conftest import ROOT
from tests.support.inside import Make, make_stage, prepare, run_epoch, run_stage, session_of, stage_run

SAMPLING = frozenset({Part.DENOISER, Part.VAE})


def test_text_encoders_are_let_go_when_a_stage_does_not_need_them(make_config: Make) -> None:
    context = begin_run(make_config())
    run_stage(context, "base", 0)
    run_stage(context, "encode", 0)
    assert set(session_of(context).host.loaded()) == {"encoder"}
    assert session_of(context).host.loaded()["encoder"] > 0
    for name in ("preprocess", "policy"):
        run_stage(context, name, 0)
    run_stage(context, "rollout", 1)
    assert set(session_of(context).host.loaded()) == {"policy"}
    session_of(context).close()
    assert session_of(context).host.loaded() == {}


def test_each_part_is_loaded_once_in_a_run(make_config: Make) -> None:
    context = prepare(make_config())
    for epoch in (1, 2):
        run_epoch(context, epoch)
        run_stage(context, "evaluate", epoch)
    assert session_of(context).host.loads == {"text": 1, "denoiser": 1, "vae": 1}


def test_a_policy_that_was_just_trained_is_that_of_its_artifact(make_config: Make) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    kept = session_of(context).host.trainable(context.policy_ref(1))
    trained = {name: value.clone() for name, value in kept.state().items()}
    fresh = session_of(open_run(context.store.root.uri, "small")).host.trainable(context.policy_ref(1)).state()
    assert all(torch.equal(trained[name], fresh[name]) for name in fresh)
    base = session_of(context).host.trainable(context.policy_ref(0), Weights.BEHAVIOR).state()
    assert any(not torch.equal(base[name], fresh[name]) for name in fresh)


def test_a_record_says_what_was_held_and_the_peak(make_config: Make) -> None:
    context = prepare(make_config())
    run = stage_run(context, "rollout", 1)
    run.execute()
    memory = context.store.shards(run.ref)[0].producer["memory"]
    assert memory["policy"] == session_of(context).host.loaded()["policy"]
    assert memory["peak"] > memory["policy"]


def test_a_record_says_what_computed_it(make_config: Make) -> None:
    context = prepare(make_config())
    run = stage_run(context, "rollout", 1)
    run.execute()
    (record, *_) = context.store.shards(run.ref)
    facts = record.producer["computed_by"]
    assert facts["torch"] == torch.__version__
    assert set(facts) == {"device", "torch", "diffusers", "transformers", "peft", "float32_matmul", "deterministic"}
    assert (facts["float32_matmul"], facts["deterministic"]) == ("highest", "false")


def test_settings_of_precision_are_those_of_the_moment() -> None:
    cpu = torch.device("cpu")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert computing_facts(cpu)["float32_matmul"] == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert computing_facts(cpu)["float32_matmul"] == before


@pytest.mark.parametrize(
    ("reserved", "allocated", "conf", "reported"),
    [
        (80e9, 60e9, "", "20.0 GB are reserved in pieces that nothing fits into: set PYTORCH_ALLOC_CONF="),
        (80e9, 79e9, "", None),
        (80e9, 60e9, "expandable_segments:True", None),
    ],
)
def test_memory_in_pieces_is_told_of(
    monkeypatch: pytest.MonkeyPatch, reserved: float, allocated: float, conf: str, reported: str | None
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", conf)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: int(reserved))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: int(allocated))
    advice = allocator_advice(torch.device("cuda"))
    assert advice == "" if reported is None else reported in advice
    assert allocator_advice(torch.device("cpu")) == ""


def test_the_decoder_leaves_the_device_while_nothing_is_decoded(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = prepare(make_config())
    host = session_of(context).host
    policy = host.trainable(context.policy_ref(0)).policy
    moves: list[torch.device] = []
    policy.move_decoder = moves.append  # type: ignore[method-assign]
    vars(host)["device"] = torch.device("meta")
    monkeypatch.setattr("flowmill.tasks.runtime.host.free_cached_memory", lambda device: None)
    for parts in (SAMPLING, SAMPLING, frozenset({Part.DENOISER}), SAMPLING):
        host.prepare(parts)
    assert [device.type for device in moves] == ["meta", "cpu", "meta"]


def test_a_process_that_trains_first_keeps_the_decoder_off_the_device(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = session_of(prepare(make_config())).host
    policy, moves = host.load(SAMPLING), []  # type: ignore[var-annotated]
    policy.move_decoder = moves.append  # type: ignore[method-assign]
    host.release()
    monkeypatch.setattr(host, "load", lambda parts, **_: policy)
    monkeypatch.setattr("flowmill.tasks.runtime.host.free_cached_memory", lambda device: None)
    vars(host)["device"] = torch.device("meta")
    host.prepare(frozenset({Part.DENOISER}))
    host._loaded()
    assert [device.type for device in moves] == ["cpu"]


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Makes torch find so many accelerators of a kind."""

    def find(kind: str, count: int) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return find


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [("auto", 0, "cuda:0"), ("auto", 1, "cuda:1"), ("cuda", 1, "cuda:1"), ("cuda:1", 0, "cuda:1"), ("cpu", 5, "cpu")],
)
def test_a_process_takes_the_device_of_its_number(
    accelerators: Callable[[str, int], None], name: str, number: int, expected: str
) -> None:
    accelerators("cuda", 2)
    assert chosen_device(name, number) == torch.device(expected)


@pytest.mark.parametrize(
    ("kind", "count", "name", "number", "message"),
    [
        ("cuda", 2, "auto", 2, r"process 2 of this machine needs device 2, but it has 2\. Set execution"),
        ("cuda", 2, "cuda:3", 0, r"'cuda:3' is one device, but this machine has 2"),
        ("cuda", 2, "cuda:0", 1, r"'cuda:0' is one device, but there are 2 processes or more"),
        ("xpu", 1, "cuda", 0, r"'cuda', but torch finds 'xpu' on this machine"),
        ("cuda", 0, "cuda", 0, r"'cuda', but torch finds no accelerator"),
        ("cuda", 1, "gpu", 0, r"execution\.device 'gpu' is no device of torch"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    accelerators: Callable[[str, int], None], kind: str, count: int, name: str, number: int, message: str
) -> None:
    accelerators(kind, count)
    with pytest.raises(ConfigError, match=message):
        chosen_device(name, number)


def test_without_an_accelerator_auto_is_the_cpu(accelerators: Callable[[str, int], None]) -> None:
    accelerators("cuda", 0)
    assert chosen_device("auto", 3) == torch.device("cpu")


def test_more_processes_than_devices_are_refused_before_any_is_started(
    make_config: Make, accelerators: Callable[[str, int], None]
) -> None:
    accelerators("cuda", 2)
    context = begin_run(make_config("execution.processes=3"))
    with pytest.raises(ConfigError, match=r"Set execution\.processes to 2 or less"):
        session_of(context).executor(RankExecutor).start()
    assert session_of(context).executor(RankExecutor).starts == 0


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_reward_that_says_so_is_scored_by_the_ranks(
    make_config: Make, accelerated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = Needs(accelerated=accelerated)
    monkeypatch.setattr("flowmill.models.rewards.jpeg.JpegCompressibility.needs", needs, raising=False)
    context = begin_run(make_config())
    assert make_stage(context, "score", 1, "jpeg_compressibility").on_ranks == accelerated


@pytest.mark.parametrize(
    ("stage", "remedy"), [("rollout", r"execution\.rollout_batch_size"), ("encode", r"execution\.encode_batch_size")]
)
def test_too_little_memory_says_what_to_change(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, stage: str, remedy: str
) -> None:
    context = prepare(make_config()) if stage == "rollout" else begin_run(make_config())
    run_stage(context, "base", 0)

    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of ...")

    monkeypatch.setattr("flowmill.models.policies.sd3.SD3.encode", full)
    monkeypatch.setattr("flowmill.models.policies.sd3.SD3.call", full)
    epoch = 1 if stage == "rollout" else 0
    with pytest.raises(OutOfMemoryError, match=rf"^{stage}@{epoch}: Tried to allocate 20\.00 GiB\. Lower {remedy}"):
        run_stage(context, stage, epoch)


def test_the_peak_grows_with_this_process_and_leaves_out_its_parent() -> None:
    before = process_peak()
    held = np.ones(2**25)
    assert process_peak() >= before
    assert process_peak() > held.nbytes
    # Here the parent holds more than a new process needs.
    code = "from flowmill.tasks.runtime.process_memory import process_peak; print(process_peak())"
    own = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert 2**20 < int(own.stdout) < 2**27 < held.nbytes
