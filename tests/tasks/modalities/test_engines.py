"""Rollouts that a server draws: trained like all others, refused where the server has other weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowmill.configs.errors import ConfigError, EngineError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.plan import RunPlan
from tests.support.engines import Engine, engine_of
from tests.support.inside import make_stage, prepare, run_epoch, run_stage, stored_shards, updates_of
from tests.support.language_models import texts_config, write_language_model


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Engine]:
    write_language_model(tmp_path / "lm")
    with engine_of(tmp_path / "lm") as serving:
        yield serving


def config_of(folder: Path, server: Engine, /, *overrides: str, **options: Any) -> RunConfig:
    about = {"endpoint": server.url, "model": "tiny", "patience_s": 0.0, "tolerance": 0.001, **options}
    engine = {"name": "openai", "options": about}
    (folder / "texts.yaml").unlink(missing_ok=True)
    return texts_config(folder, *overrides, tokens={"max_new": 4, "engine": engine})


def rollout(context: RunContext, epoch: int = 1) -> None:
    run_stage(context, "rollout", epoch)


def committed(context: RunContext) -> int:
    return len(context.store.records(make_stage(context, "rollout", 1).ref))


def test_a_server_draws_what_is_trained_with_ratios_of_1_and_gets_the_weights(tmp_path: Path, server: Engine) -> None:
    options = {"folder": str(tmp_path / "weights"), "reload": server.reload_url}
    algorithm = "optimize.algorithm={name: grpo, options: {tis: 2.0}}"
    config = config_of(tmp_path, server, algorithm, "optimize.learning_rate=0.01", **options)
    check_config(config)
    server.lie = less_likely
    context = prepare(config)
    for epoch in (1, 2):
        if epoch == 2:
            # As ranks do that hold weights together: the first brings them before any draws.
            make_stage(context, "rollout", epoch).load()
            assert len(server.loaded) == 2
        run_epoch(context, epoch)
        updates = updates_of(context, epoch)
        assert updates[0]["ratio_mean"] == 1.0
        assert updates[0]["replay_gap_max"] == 0.0
        assert updates[0]["sampler_gap"] == pytest.approx(5e-4, abs=1e-5)
        assert updates[0]["tis"] == pytest.approx(1.0005, abs=1e-5)
    assert len(server.loaded) == 3
    assert len({each["path"] for each in server.loaded}) == 2
    drawn = [each for each in server.requests if each["max_tokens"] == 4]
    seeds = set()
    for epoch in (1, 2):
        for shard in stored_shards(context, epoch, "rollout"):
            seeds |= set(shard.table.column("seed").to_pylist())
    assert seeds == {each["seed"] for each in drawn}
    assert len(seeds) == len(drawn) == 32
    proofs = [each for each in server.requests if each["max_tokens"] == 1]
    assert len(proofs) == 2, "before every rollout"
    assert proofs[0]["prompt"] == proofs[1]["prompt"]
    # The policy of epoch 1 is what an adapter or a whole model on disk says it is.
    moved = sum(abs(a - b) for a, b in zip(*(said(server, each["path"]) for each in server.loaded[:2]), strict=True))
    assert moved > 0.01


def less_likely(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of a server whose kernels round otherwise."""
    reported = answer["choices"][0]["logprobs"]
    reported["token_logprobs"] = [each - 5e-4 for each in reported["token_logprobs"]]
    return answer


def said(server: Engine, path: str) -> list[float]:
    server.load(Path(path))
    return server.log_probs([1, 5, 6, 13, 7, 14])


def test_stale_weights_are_refused_before_and_within_a_rollout(tmp_path: Path, server: Engine) -> None:
    context = prepare(config_of(tmp_path, server))
    write_language_model(tmp_path / "other", seed=7)
    server.load(tmp_path / "other")
    with pytest.raises(EngineError, match="does not have the weights of the policy"):
        rollout(context)
    assert committed(context) == 0
    assert len(server.requests) == 1, "nothing was drawn"
    server.load(tmp_path / "lm")
    count = iter(range(1000))

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        # After the proof and the first of two shards.
        if next(count) == 8:
            server.load(tmp_path / "other")
        return answer

    server.lie = change
    with pytest.raises(EngineError, match="it drew with other weights, or with another temperature"):
        rollout(context)
    assert committed(context) == 1
    server.load(tmp_path / "lm")
    rollout(context)
    assert committed(context) == 2, "it goes on where it was"


def test_a_lie_commits_nothing(tmp_path: Path, server: Engine) -> None:
    context = prepare(config_of(tmp_path, server))

    def lie(answer: dict[str, Any]) -> dict[str, Any]:
        if len(server.requests) > 5:
            answer["choices"][0]["token_ids"] = [4, 4, 4, 4000]
        return answer

    server.lie = lie
    with pytest.raises(EngineError, match="the token id 4000"):
        rollout(context)
    assert committed(context) == 0


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path, server: Engine) -> None:
    with pytest.raises((ConfigError, ValidationError), match="holds a password"):
        config_of(tmp_path, server, endpoint="http://me:secret@host/v1")
    with pytest.raises((ConfigError, ValidationError), match="holds a password"):
        config_of(tmp_path, server, reload="http://me:secret@host/reload")
    with pytest.raises(ConfigError, match="'modle'"):
        check_config(config_of(tmp_path, server, modle="x"))


def test_the_engine_that_is_there_anyway_changes_no_identity(tmp_path: Path, server: Engine) -> None:
    other = RunPlan(config_of(tmp_path, server))
    config = RunPlan(load_config(tmp_path / "texts.yaml", ["rollout.tokens.engine=local"]))
    plain = RunPlan(load_config(tmp_path / "texts.yaml", ["rollout.tokens={max_new: 4}"]))
    identity = plain.modality_spec
    assert identity.rollout_options(config) == identity.rollout_options(plain)
    assert "engine" not in str(identity.rollout_options(plain))
    assert "rescore" not in str(identity.rollout_options(plain))
    assert identity.rollout_options(other) == {**identity.rollout_options(plain), "engine": {"name": "openai"}}
    for which in (identity.evaluation_options, identity.training_options, identity.export_options):
        assert which(other) == which(plain)
