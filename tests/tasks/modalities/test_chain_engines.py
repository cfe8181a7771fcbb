"""Rollouts that servers of a policy draw over HTTP: the files of local ones, or an error and nothing stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.checks.check import check_config
from tasks.runs.context import RunContext
from tests.conftest import ConfigFactory
from tests.support.chain_servers import ChainServer, chain_server
from tests.support.inside import prepare, run_epoch

FOUR = "execution.rollout_batch_size=4"


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
        drawn = [each for each in (*server.requests, *second.requests) if each.rollout_return_step_indices != [0, 1]]
        assert len(drawn) == 32
        assert server.requests
        assert second.requests
        assert server.brought == second.brought
        assert len(server.brought) == 1, "the base model of the first epoch is theirs already"
