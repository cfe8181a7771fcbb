"""The forecast of idle ranks before a run begins."""

from __future__ import annotations

from flowmill.tasks.checks.check import check_config
from flowmill.tasks.checks.idle_time import idle_notes, idle_shares
from flowmill.tasks.specs.plan import RunPlan
from tests.support.inside import Make


def test_idle_shares_by_hand(make_config: Make) -> None:
    """4 groups of 4 and two lists of 4 on 8 processes, in batches of 2 and micro-batches of 16."""
    settings = ("execution.processes=8", "execution.rollout_batch_size=2", "execution.device=cpu")
    config = make_config(*settings)
    cost = check_config(config, rewards=False)
    found = {idle.stage: (idle.parts, idle.share) for idle in idle_shares(RunPlan(config), cost)}
    # 11 prompts in one shard: one of 8 works, its second batch of 8 on 3 rows.
    assert found["encode"] == (1, 1 - 11 / 8 / 16)
    assert found["rollout"] == (8, 0.0)
    assert found["optimize"] == (1, 0.875)
    assert found["evaluate"] == (4, 0.5)
    assert found.keys() & {"score", "judge"} == set(), "the reward takes no accelerator"
    agents = "execution.launcher={name: agents, options: {endpoint: 'n:1', prefixes: [[a], [b]]}}"
    nodes = make_config("execution.nodes=2", agents, "execution.processes=4", *settings[1:])
    found = {idle.stage: (idle.parts, idle.share) for idle in idle_shares(RunPlan(nodes), cost)}
    assert (found["score"], found["judge"]) == ((8, 0.0), (4, 0.5)), "the cores of several machines all score"


def test_a_better_batch_size_is_named(make_config: Make) -> None:
    config = make_config("execution.processes=8", "execution.rollout_batch_size=4", "execution.device=cpu")
    cost = check_config(config, rewards=False)
    notes = "\n".join(idle_notes(config, cost, idle_shares(RunPlan(config), cost)))
    assert "rollout: 50% of the time of 8 processes makes nothing" in notes
    assert "4 shards" in notes
    assert "execution.rollout_batch_size 4. With 1 it is less than a tenth." in notes, "2 leaves evaluations half idle"
    assert "optimize: 88% of the time" in notes
