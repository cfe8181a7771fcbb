"""Ways to share weights, tokens and rows among ranks: each trains as one process does, on every kind of denoiser."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import diffusers_class
from flowmill.models.memory.published import pipelines
from flowmill.models.policies.attention import UNSPLIT
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.execution.rank_executor import RankExecutor
from flowmill.tasks.execution.session import Session
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from tests.conftest import ROOT
from tests.support.inside import prepare, stage_run, updates_of
from tests.tasks.stages.test_stages import assert_same_trajectories, weights
from tests.tasks.stages.test_start import reference_kl

# All of them work with the same ranks.
pytestmark = pytest.mark.xdist_group("strategies")

FAMILIES = ("sd3", "flux1", "flux2", "qwen_image", "wan21", "wan22")
STRATEGIES = {
    "ddp": (),
    "fsdp": ("strategy=fsdp",),
    "fsdp, offload": ("strategy=fsdp", "offload=true"),
    "fsdp, spread": ("strategy=fsdp", "sampling=spread"),
    "two groups": ("processes=4", "strategy=fsdp", "fsdp_size=2"),
    "two groups, offload, spread": ("processes=4", "strategy=fsdp", "fsdp_size=2", "offload=true", "sampling=spread"),
    "two groups, ulysses": ("processes=4", "strategy=fsdp", "fsdp_size=2", "context_parallel=2"),
    "ulysses": ("context_parallel=2",),
    "fsdp, ulysses": ("strategy=fsdp", "context_parallel=2"),
}
#: A strategy for each family, and every one of them; the others are left to a campaign.
CHOSEN = {
    ("one machine", "sd3", "ddp"),
    ("one machine", "flux1", "fsdp"),
    ("one machine", "flux2", "fsdp, offload"),
    ("one machine", "qwen_image", "fsdp, spread"),
    ("one machine", "wan21", "ulysses"),
    ("one machine", "wan22", "fsdp, ulysses"),
    ("one machine", "sd15", "fsdp"),
    ("one machine", "z_image", "fsdp"),
    ("two agents", "wan22", "fsdp"),
}
#: On two nodes one strategy stands for all.
CASES = [
    *(("one machine", family, name) for name in STRATEGIES for family in FAMILIES if "groups" not in name),
    *(("four ranks", family, name) for name in STRATEGIES for family in FAMILIES if "groups" in name),
    *(("one machine", family, "fsdp") for family in ("sd15", "z_image")),
    *(("one machine", "wan22_ti2v", name) for name in ("ulysses", "fsdp, ulysses")),
    *(("two agents", family, "fsdp") for family in FAMILIES),
]
#: Three updates, with a reference, where splitting over ranks changes the order of sums only.
SETTINGS = (
    "optimize.updates_per_epoch=3",
    "optimize.learning_rate=1e-4",
    "optimize.algorithm={name: grpo, options: {clip_range: 1e-2, kl_coef: 0.1}}",
    "execution.micro_batch_size=4",
)


def config_of(family: str, root: Path, *settings: str) -> RunConfig:
    return load_config(ROOT / "configs" / f"tiny_{family}.yaml", [f"store.root={root}", *SETTINGS, *settings])


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankExecutor]:
    """One rank in a process of its own, as the others are."""
    made = RankExecutor(Session(begin_run(config_of("sd3", tmp_path_factory.mktemp("single")))))
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunContext]:
    """An epoch of each family in one process, made when it is asked for."""
    return {}


@pytest.fixture(scope="module")
def crew(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankExecutor]:
    """Two resident ranks, or four, that take orders of many runs."""
    settings = [f"execution.processes={4 if request.param == 'four ranks' else 2}"]
    if request.param == "two agents":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = f"{{endpoint: '127.0.0.1:{port}', prefixes: [[], []]}}"
        settings = ["execution.nodes=2", f"execution.launcher={{name: agents, options: {options}}}"]
    made = RankExecutor(Session(begin_run(config_of("sd3", tmp_path_factory.mktemp("crew"), *settings))))
    yield made
    made.close()


def on_ranks(crew: RankExecutor, context: RunContext, epoch: int) -> None:
    """Carry out an epoch, on the ranks what they work on."""
    for name, slot in (("rollout", ""), ("score", "jpeg_compressibility"), ("advantage", ""), ("optimize", "")):
        run = stage_run(context, name, epoch, slot)
        if run.stage.on_ranks:
            crew.run(run, run.pending())
            run.finish()
        else:
            run.execute()


def updates(context: RunContext) -> list[dict[str, float]]:
    """Return the figures of epoch 1's updates."""
    found: list[dict[str, float]] = updates_of(context, 1)
    return found


@pytest.mark.campaign_cases(
    "one machine-z_image-fsdp",
    "one machine-sd15-fsdp",
    "two agents-wan22-fsdp",
    "one machine-wan22-fsdp, ulysses",
    "one machine-qwen_image-fsdp, spread",
    "one machine-flux2-fsdp, offload",
)
@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("crew", "family", "strategy"),
    [
        pytest.param(*case, marks=() if case in CHOSEN else pytest.mark.campaign)
        for case in CASES
        if "ulysses" not in case[2] or case[1] not in UNSPLIT
    ],
    indirect=["crew"],
    scope="module",
)
def test_two_ranks_train_as_one_process(
    crew: RankExecutor,
    single: RankExecutor,
    alone: dict[str, RunContext],
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    strategy: str,
) -> None:
    if family not in alone:
        alone[family] = prepare(config_of(family, tmp_path_factory.mktemp(family)))
        on_ranks(single, alone[family], 1)
    one = alone[family]
    chosen = [f"execution.{setting}" for setting in ("processes=2", *STRATEGIES[strategy])]
    two = prepare(config_of(family, tmp_path_factory.mktemp("two"), *chosen))
    on_ranks(crew, two, 1)
    assert_same_trajectories(one, two)
    # AdamW hardly heeds how large gradients are, which is what a sum that is a mean changes.
    norms = [[each["grad_norm"] for each in updates(context)] for context in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    ours, theirs = weights(one), weights(two)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 3e-5
    first = weights(one, 0)
    assert max(float((ours[name] - first[name]).abs().max()) for name in ours) > 1e-4
    assert crew.starts == 1


@pytest.mark.campaign_cases("means-fsdp-one machine")
@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("crew", ["one machine"], indirect=True, scope="module")
@pytest.mark.parametrize(
    "strategy",
    [pytest.param("ddp", marks=pytest.mark.campaign), "fsdp", pytest.param("ulysses", marks=pytest.mark.campaign)],
)
@pytest.mark.parametrize(
    "algorithm",
    ["optimize.replay={epochs: 0}", "optimize.algorithm={name: grpo, options: {clip_range: 1e-2, from_means: true}}"],
    ids=["weights", "means"],
)
def test_two_ranks_correct_rows_of_an_older_policy_as_one_process(
    crew: RankExecutor, single: RankExecutor, tmp_path: Path, strategy: str, algorithm: str
) -> None:
    """Each rank recomputes only the rows it trains."""
    settings = ["execution.ahead=1", "optimize.learning_rate=1e-3", algorithm]
    one = prepare(config_of("flux1", tmp_path / "one", *settings))
    two = prepare(
        config_of(
            "flux1", tmp_path / "two", *settings, *[f"execution.{s}" for s in ("processes=2", *STRATEGIES[strategy])]
        )
    )
    for epoch in (1, 2):
        on_ranks(single, one, epoch)
        on_ranks(crew, two, epoch)
    first = [updates_of(context, 2)[0] for context in (one, two)]
    for name in ("loss", "ratio_mean", "importance", "behavior_kl", "rows"):
        assert first[0][name] == pytest.approx(first[1][name], rel=1e-3, abs=1e-5), name
    assert first[0]["importance"] != 1.0
    ours, theirs = weights(one, 2), weights(two, 2)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("crew", ["one machine"], indirect=True, scope="module")
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("fsdp, spread", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("lora", ["{rank: 2, alpha: 4}", pytest.param("null", marks=pytest.mark.campaign)])
def test_two_ranks_compare_with_the_policy_they_started_from_as_one_process(
    crew: RankExecutor, single: RankExecutor, tmp_path: Path, strategy: str, lora: str
) -> None:
    """In rollouts and in training, where adapters of the reference are exchanged with the trained ones."""
    # With Adam's usual epsilon, gradients that are 0 but for rounding move weights as far as others do.
    settings = [f"model.lora={lora}", "advantage.kl_coef=0.1", "optimize.learning_rate=1e-2", "optimize.epsilon=1e-5"]
    ranks = [f"execution.{each}" for each in ("processes=2", *STRATEGIES[strategy])]
    on_ranks(single, prepare(config_of("sd3", tmp_path, *settings, "run.name=first")), 1)
    started = [*settings, "model.start=first@1", "run.seed=3"]
    one = prepare(config_of("sd3", tmp_path, *started, "run.name=one"))
    # Another root, as equal work has one name.
    on_ranks(single, prepare(config_of("sd3", tmp_path / "two", *settings, "run.name=first")), 1)
    two = prepare(config_of("sd3", tmp_path / "two", *started, *ranks, "run.name=two"))
    for epoch in (1, 2):
        on_ranks(single, one, epoch)
        on_ranks(crew, two, epoch)
    first, second = (updates_of(context, 2)[0]["kl"] for context in (one, two))
    assert first == pytest.approx(second, rel=1e-2)
    assert first > 1e-9 > updates(one)[0]["kl"]
    sampled, shared = reference_kl(one, 2), reference_kl(two, 2)
    assert sampled == pytest.approx(shared, rel=2e-2, abs=1e-9)
    assert max(sampled) > 1e-8


#: Algorithms that ask a reward while training, of clips too, on ranks with uneven numbers of micro-batches.
ASKING = {
    "refl": ("{name: refl, options: {steps: 2, truncate: true, margin: 1}}", "late, options: {count: 2, low: 0}"),
    "srpo": (
        "{name: direct_align, options: {step: 0.1, times: {count: 1, high: 0.8}, positive: [a], negative: [bc]}}",
        "final",
    ),
}


@pytest.mark.campaign
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("crew", ["one machine"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("algorithm", "family", "strategy"),
    [
        (algorithm, family, strategy)
        for algorithm, family in (("refl", "sd3"), ("srpo", "flux1"), ("refl", "wan21"))
        for strategy in ("ddp", "fsdp", "fsdp, ulysses")
        if "ulysses" not in strategy or family not in UNSPLIT
    ],
)
def test_two_ranks_ask_rewards_as_one_process(
    crew: RankExecutor, single: RankExecutor, tmp_path: Path, algorithm: str, family: str, strategy: str
) -> None:
    chosen, plan = ASKING[algorithm]
    reward = "{name: 'tests.tasks.stages.test_asking:Ink', label: jpeg_compressibility}"
    settings = [
        f"optimize.algorithm={chosen}",
        f"rollout.plan={{name: {plan}}}",
        f"rewards=[{reward}]",
        "evaluate.judges=[]",
        "execution.micro_batch_size=3",
        "optimize.learning_rate=1e-3",
    ]
    ranks = [f"execution.{setting}" for setting in ("processes=2", *STRATEGIES[strategy])]
    one, two = (
        prepare(config_of(family, tmp_path / name, *settings, *more)) for name, more in (("one", []), ("two", ranks))
    )
    on_ranks(single, one, 1)
    on_ranks(crew, two, 1)
    ours, theirs = weights(one), weights(two)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4
    first = weights(one, 0)
    assert max(float((ours[name] - first[name]).abs().max()) for name in ours) > 1e-3


@pytest.mark.campaign_cases("branches-one machine")
@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("crew", ["one machine"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("sd3", ["model.lora=null", "advantage.kl_coef=0.1", "rollout.plan={name: window, options: {size: 2}}"]),
        ("sd3", ["rollout.plan={name: branch, options: {branches: 3, steps: [0, 2]}}", "optimize.updates_per_epoch=1"]),
        ("wan22", ["rollout.prompts_per_epoch=1"]),
    ],
    ids=["a reference in some steps", "branches", "one shard"],
)
def test_ranks_that_sample_in_step_need_not_take_equally_many_steps(
    crew: RankExecutor, single: RankExecutor, tmp_path: Path, family: str, settings: list[str]
) -> None:
    """Three shards or one on two ranks, and forwards that other shards do not have."""
    uneven = ["rollout.prompts_per_epoch=3", "rollout.groups_per_shard=1", "execution.rollout_batch_size=3", *settings]
    # What compares the samples of a group keeps it in one shard, whoever makes it.
    uneven.append("monitors=[{name: diversity}]")
    one = prepare(config_of(family, tmp_path / "one", *uneven))
    spread = ["execution.processes=2", "execution.strategy=fsdp", "execution.sampling=spread"]
    two = prepare(config_of(family, tmp_path / "two", *uneven, *spread))
    for name, epoch in (("rollout", 1), ("evaluate", 0)):
        made = []
        for context, ranks in ((one, single), (two, crew)):
            run = stage_run(context, name, epoch)
            ranks.run(run, run.pending())
            run.finish()
            manifest = context.store.require(run.ref)
            made.append((manifest.content, manifest.shards if name == "rollout" else ()))
        assert made[0] == made[1], "every file of a rollout is the same to the byte"


def test_the_families_whose_tokens_cannot_be_split_are_those_without_a_plan() -> None:
    presets = [load_config(path) for path in sorted((ROOT / "configs").glob("*.yaml"))]
    plans = {
        preset.model.policy: diffusers_class(pipelines()[preset.model.path].denoiser)._cp_plan
        for preset in presets
        if preset.model.path in pipelines()
    }
    assert set(plans) >= {"sd15", "sd3", "flux1", "flux2", "qwen_image", "wan21", "wan22", "z_image"}
    # There is one for LTX-2, which splits the clip and leaves its sound whole.
    without = {family for family, plan in plans.items() if plan is None} | {"ltx2"}
    # Tasks that begin with images have the denoisers of those that do not.
    assert without | {"hunyuan_video15_i2v", "ltx2_i2v"} == UNSPLIT


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["execution.context_parallel=5", "execution.processes=5"], "24 attention heads, which that does not divide"),
        (["model.height=528", "model.width=528"], "a row has 1089 tokens"),
        (["model.options={max_sequence_length: 77}"], "a row has 77 text tokens"),
    ],
)
def test_a_published_model_that_cannot_be_shared_out_evenly_is_refused(settings: list[str], said: str) -> None:
    shared = ["execution.processes=2", "execution.context_parallel=2"]
    config = load_config(ROOT / "configs" / "flux1_dev.yaml", [*shared, *settings])
    with pytest.raises(ConfigError, match=said):
        check_config(config, rewards=False)
