"""Rollouts that servers of a policy draw over HTTP: the files of local ones, or an error and nothing stored."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from configs.errors import ConfigError, EngineError
from models.engines.chains import Chain
from tasks.checks.check import check_config
from tasks.runs.context import RunContext
from tasks.runs.opening import open_run
from tasks.specs.modalities import modality_spec
from tasks.stages.stage_run import StageRun
from tests.conftest import ConfigFactory
from tests.support.chain_servers import ChainServer, chain_server
from tests.support.inside import make_stage, prepare, run_epoch
from tests.support.serving import Server, spoiling

FOUR = "execution.rollout_batch_size=4"
#: The steps that a server's check draws.
PROOF = [0, 1]
#: A base model that a run builds.
BUILT = ("model.path=null", "model.build={name: digits, options: {vae_steps: 2, steps: 2, images: 256}}")


@pytest.fixture
def server(config_file: Path) -> Iterator[ChainServer]:
    with chain_server(config_file) as serving:
        yield serving


def served_by(*urls: str, name: str = "flowmill", **options: Any) -> str:
    about = {"servers": list(urls), "patience_s": 0.0, **options}
    return f"rollout.engine={yaml.safe_dump({'name': name, 'options': about}, default_flow_style=True, width=999)}"


def digests(context: RunContext, epochs: int) -> list[tuple[str, str]]:
    refs = [context.chain.require(epoch, "rollout").ref for epoch in range(1, epochs + 1)]
    return [(str(ref), context.store.require(ref).digest) for ref in refs]


def rollout(context: RunContext, epoch: int = 1) -> None:
    StageRun(make_stage(context, "rollout", epoch)).execute()


def committed(context: RunContext, epoch: int = 1) -> int:
    return len(context.store.records(make_stage(context, "rollout", epoch).ref))


def drawn(server: ChainServer) -> int:
    return sum(each.rollout_return_step_indices != PROOF for each in server.requests)


def test_servers_draw_the_files_of_the_local_sampler(
    server: ChainServer, make_config: ConfigFactory, config_file: Path, tmp_path: Path
) -> None:
    with chain_server(config_file) as second:
        config = make_config(served_by(server.url, second.url), FOUR)
        check_config(config)
        local, context = prepare(make_config(f"store.root={tmp_path}/local", FOUR)), prepare(config)
        for epoch in (1, 2):
            run_epoch(local, epoch)
            run_epoch(context, epoch)
        assert digests(context, 2) == digests(local, 2)
        assert drawn(server) + drawn(second) == 32
        assert drawn(server) > 0 < drawn(second)
        assert server.brought == second.brought
        assert len(server.brought) == 1, "the base model of the first epoch is theirs already"


def test_a_server_with_a_store_of_its_own_builds_the_base_model(
    make_config: ConfigFactory, config_file: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    with chain_server(config_file, *BUILT, f"store.root={elsewhere}") as server:
        local = prepare(make_config(f"store.root={tmp_path}/local", *BUILT))
        context = prepare(make_config(served_by(server.url), *BUILT))
        rollout(local)
        rollout(context)
        assert digests(context, 1) == digests(local, 1)
    state = open_run(str(elsewhere), context.run.name)
    assert [entry.stage for entry in state.chain.entries()] == ["base"]


@pytest.mark.parametrize(
    "given",
    [
        # Adapters, guidance with stored predictions, a window of each group, the KL to the base model.
        "model.lora={rank: 2, alpha: 4} model.guidance_scale=3 optimize.guidance_gradient=conditional "
        "rollout.unconditional=true rollout.plan={name: window, options: {size: 1}} advantage.kl_coef=0.01",
        # No stochastic step at all, another solver, groups that share a part of their start.
        "optimize.algorithm=nft rollout.plan=final rollout.solver=dpm2 optimize.ema={decay: 0.9} "
        "rollout.same_noise=true rollout.own_noise=0.5 rollout.media.latents=true",
    ],
    ids=["trained steps", "final latents"],
)
def test_whatever_is_stored_with_a_chain_is_computed_here(
    make_config: ConfigFactory, config_file: Path, tmp_path: Path, given: str
) -> None:
    settings = re.split(r" (?=[a-z_]+\.)", given)
    with chain_server(config_file, *settings) as server:
        local = prepare(make_config(f"store.root={tmp_path}/local", *settings))
        context = prepare(make_config(served_by(server.url), *settings))
        rollout(local)
        rollout(context)
        ref = make_stage(context, "rollout", 1).ref
        assert context.store.require(ref).digest == local.store.require(ref).digest
        assert drawn(server) == 16


def test_a_server_that_lost_its_weights_gets_them_again(
    server: ChainServer, make_config: ConfigFactory, tmp_path: Path
) -> None:
    context = prepare(make_config(served_by(server.url, patience_s=20.0)))
    run_epoch(context, 1)

    def lose(chains: list[Chain]) -> list[Chain]:
        # As a server that is started again after the check: it holds the base model.
        if len(chains) > 1:
            server.lie = lambda found: found
            server.policy.bring("base", {}, last=True)
        return chains

    server.lie = lose
    rollout(context, 2)
    assert server.brought[-3:] == [server.brought[0], "base", server.brought[0]]
    local = prepare(make_config(f"store.root={tmp_path}/local"))
    run_epoch(local, 1)
    rollout(local, 2)
    ref = make_stage(local, "rollout", 2).ref
    assert context.store.require(ref).digest == local.store.require(ref).digest


def test_weights_swapped_behind_its_back_are_found(server: ChainServer, make_config: ConfigFactory) -> None:
    held = server.policy._held  # type: ignore[attr-defined]

    @torch.no_grad()
    def swap(factor: float) -> None:
        for parameter in held.parameters():
            parameter.mul_(factor)

    context = prepare(make_config(served_by(server.url), "rollout.plan={name: all, options: {last: train}}"))
    swap(1.01)
    with pytest.raises(EngineError, match=r"does not have the weights of the policy: from fixed noise, .* 'tolerance'"):
        rollout(context)
    assert committed(context) == 0
    assert drawn(server) == 0
    swap(1 / 1.01)

    def change(chains: list[Chain]) -> list[Chain]:
        # After the check, and the first of two shards; every step has noise.
        if len(chains) > 1:
            server.lie = lambda found: found
            swap(1.1)
        return chains

    server.lie = change
    with pytest.raises(EngineError, match=r"its log-probs are .* 'log_prob_tolerance', .* other weights, or"):
        rollout(context)
    assert committed(context) == 1
    swap(1 / 1.1)
    rollout(context)
    assert committed(context) == 2, "it goes on where it was"


def test_a_swap_is_found_in_a_step_without_noise(make_config: ConfigFactory, config_file: Path) -> None:
    settings = ("optimize.algorithm=nft", "rollout.plan=final", "optimize.ema={decay: 0.9}")
    with chain_server(config_file, *settings) as other:
        context = prepare(make_config(served_by(other.url), *settings))

        @torch.no_grad()
        def swap(chains: list[Chain]) -> list[Chain]:
            other.policy._held.parameters()[0].mul_(1.2)  # type: ignore[attr-defined]
            return chains

        other.lie = swap
        with pytest.raises(EngineError, match=r"a step that it drew is .* from the policy's, .* 'tolerance'"):
            rollout(context)
        assert committed(context) == 0


def changed(**how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list[Chain]], list[Chain]]:
    """Return a lie about tensors of chains."""
    return lambda found: [replace(each, **{k: f(getattr(each, k)) for k, f in how.items()}) for each in found]


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (changed(latents=lambda x: x[..., :-1]), r"its latents have the shape .* another layout"),
        (changed(latents=lambda x: x * float("nan")), r"its latents are not finite \(NaN or infinite\)"),
        (changed(log_probs=lambda x: x * float("nan")), r"its rollout_log_probs are not finite"),
        (changed(log_probs=lambda x: x[:-1]), r"it has log-probs of the shape \(2,\) for 3 steps"),
        (changed(log_probs=lambda x: x + 0.5), r"with another sampler than rollout.sampler"),
        (changed(sigmas=lambda x: x**2), r"its noise levels are 1, .* Give the server the scheduler of model.path"),
        (changed(sigmas=lambda x: x[:-1]), r"its noise levels are"),
        (
            lambda found: [replace(each, states=each.states[:1], latents=each.latents[:1]) for each in found],
            "lacks the",
        ),
    ],
)
def test_answers_that_cannot_be_used_store_nothing(
    server: ChainServer, make_config: ConfigFactory, lie: Callable[[list[Chain]], list[Chain]], said: str
) -> None:
    context = prepare(make_config(served_by(server.url)))
    # The check passes; rows of a batch are together.
    server.lie = lambda found: lie(found) if len(found) > 1 else found
    with pytest.raises(EngineError, match=said) as caught:
        rollout(context)
    assert "give the same command again" in str(caught.value)
    assert committed(context) == 0
    server.lie = lambda found: found
    rollout(context)
    assert committed(context) == 2


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("rollout.sampler={name: flow_sde, options: {noise_level: 0.5}}", "rollout.sampler is"),
        ("rollout.sampler=cps", "rollout.sampler is"),
        ("rollout.steps=4", "rollout.steps is 4 here, but 3 in the run"),
        ("model.guidance_scale=2.0", "model.guidance_scale is 2.0 here, but None in the run"),
        ("model.options={max_sequence_length: 1, schedule: scheduler}", "model.options is"),
        (FOUR, "execution.rollout_batch_size is 4 here, but 16 in the run"),
    ],
)
def test_a_server_of_another_config_refuses(
    make_config: ConfigFactory, config_file: Path, setting: str, named: str
) -> None:
    context = prepare(make_config(served_by("http://127.0.0.1:1")))
    with chain_server(config_file, setting) as server:
        config = make_config(served_by(server.url))
        context = RunContext(context.store, config, context.run)
        with pytest.raises(EngineError, match=rf"refuses \(422: {named}.*Serve the run's config"):
            rollout(context)
        assert committed(context) == 0


def test_another_server_takes_over_from_one_that_is_gone_slow_cut_or_lies(
    server: ChainServer, make_config: ConfigFactory, config_file: Path
) -> None:
    messages: list[str] = []

    class Reporter:
        def message(self, text: str) -> None:
            messages.append(text)

        def progress(self, *given: object) -> None:
            pass

    with (
        chain_server(config_file) as bad,
        chain_server(config_file) as slow,
        spoiling(server.url, lambda number, body: body[:-9]) as cut,
    ):
        bad.lie = changed(latents=lambda x: x * float("nan"))
        slow.lie = lambda found: time.sleep(1.5) or found
        urls = ["http://127.0.0.1:1", bad.url, slow.url, cut, server.url]
        context = prepare(make_config(served_by(*urls, patience_s=20.0, timeout_s=1.0), FOUR))
        context.reporter = Reporter()  # type: ignore[assignment]
        rollout(context)
    assert committed(context) == 2
    assert drawn(server) >= 16
    assert [text for text in messages if "are not finite" in text and "Other servers go on without it." in text]


def test_without_any_server_the_run_stops_and_goes_on_later(server: ChainServer, make_config: ConfigFactory) -> None:
    context = prepare(make_config(served_by("http://127.0.0.1:1")))
    with pytest.raises(EngineError, match=r"no server has answered for 0 s; the last: http://127.0.0.1:1: ConnectErr"):
        rollout(context)
    assert committed(context) == 0
    again = make_config(served_by(server.url))
    assert modality_spec(again).rollout_options(again) == modality_spec(again).rollout_options(context.config)
    rollout(prepare(again))


def test_a_token_is_wanted_and_sent(
    make_config: ConfigFactory, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with chain_server(config_file, token="secret") as server:
        context = prepare(make_config(served_by(server.url)))
        with pytest.raises(EngineError, match=r"\(401: the token is missing or wrong: set FLOWMILL_ROLLOUT_TOKEN"):
            rollout(context)
        monkeypatch.setenv("FLOWMILL_ROLLOUT_TOKEN", "secret")
        rollout(RunContext(context.store, context.config, context.run))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollout.latents_dtype=float16", r"rounds the latents between steps"),
        ("rollout.plan=branch", r"branches, and a request is for one chain"),
        ("rollout.engine={name: flowmill, options: {servers: []}}", r"servers is \[\]"),
        ("rollout.engine={name: flowmill, options: {servers: ['host:1']}}", "begin with http://"),
        ("rollout.engine=vllm", "rollout.engine 'vllm' does not exist"),
        ("execution={strategy: fsdp, processes: 2, sampling: spread, device: cpu}", "'whole'"),
    ],
)
def test_what_an_engine_cannot_carry_is_refused_by_check(make_config: ConfigFactory, setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(make_config(served_by("http://127.0.0.1:1"), setting))


def test_what_sglang_lacks_is_refused_by_check(make_config: ConfigFactory) -> None:
    engine = served_by("http://127.0.0.1:1", name="sglang")
    check_config(make_config(engine))
    for setting in ("rollout.sampler=dance_sde", "rollout.same_noise=true"):
        with pytest.raises(ConfigError, match=r"rollout.engine is 'sglang', but it (has no|draws)"):
            check_config(make_config(engine, setting))


def test_sglang_draws_with_its_own_noise_and_loads_merged_weights_from_a_folder(
    server: ChainServer, make_config: ConfigFactory, tmp_path: Path
) -> None:
    lora = ("model.lora={rank: 2, alpha: 4}", "optimize.learning_rate=0.01")
    engine = served_by(server.url, name="sglang", folder=str(tmp_path / "weights"), tolerance=1e-3)
    config = make_config(engine, *lora)
    check_config(config)
    context, local = prepare(config), make_config(*lora)
    identity = modality_spec(config).rollout_options
    assert identity(config) == {**identity(local), "engine": {"name": "sglang"}}
    for epoch in (1, 2):
        run_epoch(context, epoch)
        updates = context.store.require(context.policy_ref(epoch)).summary["updates"]
        assert updates[0]["ratio_mean"] == 1.0
        assert updates[0]["replay_gap_max"] == 0.0
    assert len(set(server.loaded)) == 2
    assert all(each.extra_sampling_params is None for each in server.requests)
    steps = [each for each in server.requests if each.rollout_return_step_indices != PROOF]
    assert {(each.rollout_sde_type, each.rollout_noise_level) for each in steps} == {("sde", 0.7)}
    assert len({each.seed for each in steps}) == 32


def test_an_adapter_that_sglang_did_not_load_is_found(
    server: ChainServer, make_config: ConfigFactory, tmp_path: Path
) -> None:
    lora = ("model.lora={rank: 2, alpha: 4}", "optimize.learning_rate=0.01")
    context = prepare(make_config(served_by(server.url, name="sglang"), *lora))
    run_epoch(context, 1)
    with pytest.raises(EngineError, match="does not have the weights of the policy"):
        rollout(context, 2)
    assert committed(context, 2) == 0
    server.loads = False
    folder = str(tmp_path / "weights")
    config = make_config(served_by(server.url, name="sglang", folder=folder), *lora)
    with pytest.raises(EngineError, match="did not load the weights of the policy"):
        rollout(RunContext(context.store, config, context.run), 2)


@pytest.mark.slow
def test_a_restart_of_a_real_process_in_the_middle_changes_nothing(
    make_config: ConfigFactory, config_file: Path, tmp_path: Path
) -> None:
    local = prepare(make_config(f"store.root={tmp_path}/local"))
    run_epoch(local, 1)
    rollout(local, 2)
    server = Server((str(config_file),), name="serve-rollout")
    server.start()
    try:
        context = prepare(make_config(served_by(server.url, patience_s=60.0)))
        run_epoch(context, 1)
        server.kill()
        server.start()
        rollout(context, 2)
    finally:
        server.kill()
    ref = make_stage(local, "rollout", 2).ref
    assert context.store.require(ref).digest == local.store.require(ref).digest
