"""Rollouts that a server of SGLang's protocol draws: those of the policy, or an error and nothing stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flowmill.configs.errors import EngineError
from flowmill.models.engines.chains import DenoisingChain
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.checks.try_rewards import reach_engines
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.plan import RunPlan
from tests.support.chain_servers import ChainServer, chain_server
from tests.support.inside import Make, make_stage, prepare, run_epoch, run_stage, updates_of
from tests.support.preloaded import run_forked
from tests.support.serving import spoiling

#: The states of the chain that proves a server's weights.
PROOF = [0, 1]
LORA = ("model.lora={rank: 2, alpha: 4}", "optimize.learning_rate=0.01")


@pytest.fixture
def server(config_file: Path) -> Iterator[ChainServer]:
    with chain_server(config_file) as serving:
        yield serving


def served_by(*urls: str, **options: Any) -> str:
    about = {"servers": list(urls), "patience_s": 0.0, **options}
    return f"rollout.engine={yaml.safe_dump({'name': 'sglang', 'options': about}, default_flow_style=True, width=999)}"


def rollout(context: RunContext, epoch: int = 1) -> None:
    run_stage(context, "rollout", epoch)


def committed(context: RunContext, epoch: int = 1) -> int:
    return len(context.store.records(make_stage(context, "rollout", epoch).ref))


def drawn(server: ChainServer) -> list[dict[str, Any]]:
    return [each for each in server.requests if each["rollout_return_step_indices"] != PROOF]


def test_it_draws_with_its_own_noise_and_loads_merged_weights_from_a_folder(
    server: ChainServer, make_config: Make, tmp_path: Path
) -> None:
    engine = served_by(server.url, folder=str(tmp_path / "weights"), tolerance=1e-3)
    config = make_config(engine, *LORA)
    check_config(config)
    context, plan, local = prepare(config), RunPlan(config), RunPlan(make_config(*LORA))
    identity = plan.modality_spec.rollout_options
    assert identity(plan) == {**identity(local), "engine": {"name": "sglang"}}
    for epoch in (1, 2):
        run_epoch(context, epoch)
        updates = updates_of(context, epoch)
        assert updates[0]["ratio_mean"] == 1.0
        assert updates[0]["replay_gap_max"] == 0.0
    assert len(set(server.loaded)) == 2
    steps = drawn(server)
    assert {(each["rollout_sde_type"], each["rollout_noise_level"]) for each in steps} == {("sde", 0.7)}
    assert len({each["seed"] for each in steps}) == 32


def test_an_adapter_that_it_did_not_load_is_found(server: ChainServer, make_config: Make, tmp_path: Path) -> None:
    context = prepare(make_config(served_by(server.url), *LORA))
    run_epoch(context, 1)
    with pytest.raises(EngineError, match="does not have the weights of the policy"):
        rollout(context, 2)
    assert committed(context, 2) == 0
    server.loads = False
    config = make_config(served_by(server.url, folder=str(tmp_path / "weights")), *LORA)
    with pytest.raises(EngineError, match="did not load the weights of the policy"):
        rollout(RunContext(context.store, config, context.run), 2)


def test_a_stored_engine_that_drew_as_this_process_is_no_part_of_a_rollout(make_config: Make) -> None:
    earlier = make_config("rollout.engine={name: flowmill, options: {servers: ['http://127.0.0.1:1']}}")
    before, now = RunPlan(earlier), RunPlan(make_config())
    assert before.modality_spec.rollout_options(before) == now.modality_spec.rollout_options(now)


def test_weights_swapped_behind_its_back_are_found(server: ChainServer, make_config: Make) -> None:
    @torch.no_grad()
    def swap(factor: float) -> None:
        for parameter in server.held.parameters():
            parameter.mul_(factor)

    context = prepare(make_config(served_by(server.url), "rollout.plan={name: all, options: {last: train}}"))
    swap(1.01)
    with pytest.raises(EngineError, match=r"does not have the weights of the policy: from fixed noise, .* 'tolerance'"):
        rollout(context)
    assert (committed(context), drawn(server)) == (0, [])
    swap(1 / 1.01)

    def change(chain: DenoisingChain) -> DenoisingChain:
        # After the check; every step has noise.
        if len(chain.states) > 2:
            server.lie = lambda found: found
            swap(1.1)
        return chain

    server.lie = change
    with pytest.raises(EngineError, match=r"its log-probs are .* 'log_prob_tolerance', .* other weights, or"):
        rollout(context)
    swap(1 / 1.1)
    rollout(context)
    assert committed(context) == 2


def test_a_swap_is_found_in_a_step_without_noise(make_config: Make, config_file: Path) -> None:
    settings = ("optimize.algorithm=nft", "rollout.plan=final", "optimize.ema={decay: 0.9}")
    with chain_server(config_file, *settings) as other:
        context = prepare(make_config(served_by(other.url), *settings))

        @torch.no_grad()
        def swap(chain: DenoisingChain) -> DenoisingChain:
            other.held.parameters()[0].mul_(1.2)
            return chain

        other.lie = swap
        with pytest.raises(EngineError, match=r"a step that it drew is .* from the policy's, .* 'tolerance'"):
            rollout(context)
        assert committed(context) == 0


def changed(**how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[DenoisingChain], DenoisingChain]:
    """Return a lie about tensors of a chain."""
    return lambda chain: replace(chain, **{name: f(getattr(chain, name)) for name, f in how.items()})


#: What a server says of chains, and why that cannot be used.
LIES: list[tuple[Callable[[DenoisingChain], DenoisingChain], str]] = [
    (changed(latents=lambda x: x[..., :-1]), r"its latents have the shape .* another layout"),
    (changed(latents=lambda x: x * float("nan")), r"its latents are not finite \(NaN or infinite\)"),
    (changed(log_probs=lambda x: x * float("nan")), r"its rollout_log_probs are not finite"),
    (changed(log_probs=lambda x: x[:-1]), r"it has log-probs of the shape \(2,\) for 3 steps"),
    (changed(log_probs=lambda x: x + 0.5), r"with another sampler than rollout.sampler"),
    (changed(sigmas=lambda x: x**2), r"its noise levels are 1, .* Give the server the scheduler of model.path"),
    (changed(sigmas=lambda x: x[:-1]), r"its noise levels are"),
    (lambda chain: replace(chain, states=chain.states[:1], latents=chain.latents[:1]), "lacks the"),
]


def test_answers_that_cannot_be_used_store_nothing(server: ChainServer, make_config: Make) -> None:
    context = prepare(make_config(served_by(server.url)))
    for lie, said in LIES:
        server.lie = lambda chain, lie=lie: lie(chain) if len(chain.states) > 2 else chain  # type: ignore[misc]
        with pytest.raises(EngineError, match=said) as caught:
            rollout(context)
        assert "give the same command again" in str(caught.value)
        assert committed(context) == 0
    server.lie = lambda chain: chain
    rollout(context)
    assert committed(context) == 2


def test_a_cut_answer_is_asked_for_again(server: ChainServer, make_config: Make) -> None:
    with spoiling(server.url, lambda number, body: body[:-9] if number < 3 else body) as url:
        context = prepare(make_config(served_by(url, patience_s=20.0)))
        rollout(context)
    assert committed(context) == 2


def test_without_a_server_the_run_stops_and_goes_on_later(server: ChainServer, make_config: Make) -> None:
    context = prepare(make_config(served_by("http://127.0.0.1:1")))
    with pytest.raises(EngineError, match=r"at http://127.0.0.1:1 has not answered for 0 s; the last: ConnectErr"):
        rollout(context)
    assert committed(context) == 0
    rollout(prepare(make_config(served_by(server.url))))


@pytest.mark.slow
def test_a_server_that_is_missing_is_named_before_the_work(
    server: ChainServer, make_config: Make, config_file: Path, tmp_path: Path, preloaded: str
) -> None:
    reach_engines(make_config(served_by(server.url)))
    root = tmp_path / "store"
    line = ["run", str(config_file), "--root", str(root), "--set", served_by("http://127.0.0.1:1")]
    done = run_forked(preloaded, line, cwd=tmp_path, env=dict(os.environ), timeout=300)
    assert "at http://127.0.0.1:1 has not answered for 0 s" in done.stderr
    assert "sglang serve" in done.stderr
    assert done.returncode == 1
    assert not list(root.rglob("*.tar"))


def test_a_token_is_sent(make_config: Make, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with chain_server(config_file, token="secret") as server:
        context = prepare(make_config(served_by(server.url)))
        with pytest.raises(EngineError, match=r"refuses \(401: the token is missing or wrong"):
            rollout(context)
        monkeypatch.setenv("FLOWMILL_ROLLOUT_TOKEN", "secret")
        rollout(RunContext(context.store, context.config, context.run))
