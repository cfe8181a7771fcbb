"""Language models on ranks: two train a policy and its critic as one process does, spread over them or not."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

import pytest
import yaml

from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.tasks.execution.rank_executor import RankExecutor
from flowmill.tasks.execution.session import Session
from flowmill.tasks.inputs.weight_sources import CRITIC, Weights
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.specs.plan import RunPlan
from tests.support.inside import prepare, stage_rows, stage_run, updates_of
from tests.support.language_models import texts_data, write_language_model
from tests.support.vision_classes import vision_data
from tests.tasks.stages.test_stages import stored

# All of them work with the same ranks.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("texts on ranks"), pytest.mark.usefixtures("forked_ranks")]

#: Three updates with a KL in the reward, where splitting over ranks changes the order of sums only.
SETTINGS = (
    "optimize.algorithm=ppo",
    "advantage.estimator.options={kl_coef: 0.05}",
    "optimize.updates_per_epoch=3",
    "optimize.learning_rate=1e-4",
    "critic.learning_rate=1e-3",
    "execution.micro_batch_size=4",
    "run.epochs=2",
    # Prompts are longer than texts, so that the logits of texts alone are computed.
    "rollout.tokens.instruction='1+1=2 1+2=3 2+2=4 2+3=5 {prompt}'",
)
CASES = {
    "ddp": (),
    "fsdp": ("execution.strategy=fsdp",),
    "fsdp, adapters": ("execution.strategy=fsdp", "model.lora={rank: 2, alpha: 4}"),
    "fsdp, shared backbone": ("execution.strategy=fsdp", "critic.backbone=policy"),
    "fsdp, log-probs": ("execution.strategy=fsdp", "critic.log_probs=true"),
    "images, ddp": (),
    "images, fsdp": ("execution.strategy=fsdp",),
    "images, fsdp, adapters": ("execution.strategy=fsdp", "model.lora={rank: 2, alpha: 4}"),
}
#: The others are left to a campaign.
CHOSEN = {"fsdp, adapters", "images, fsdp, adapters"}


def config_of(folder: Path, name: str, *settings: str, images: bool = False, tied: bool = False) -> RunConfig:
    path = folder / "texts.yaml"
    if not path.exists():
        path.write_text(yaml.safe_dump((vision_data if images else texts_data)(folder)))
        if tied:
            write_language_model(folder / "lm", tied=True)
    return load_config(path, [f"store.root={folder / name}", *SETTINGS, *settings])


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankExecutor]]:
    """One resident rank, and two."""
    folder = tmp_path_factory.mktemp("crews")
    made = {
        count: RankExecutor(Session(begin_run(config_of(folder, "x", f"execution.processes={count}"))))
        for count in (1, 2)
    }
    yield made
    for crew in made.values():
        crew.close()


def trained(crew: RankExecutor, config: RunConfig, epochs: Container[int] = (1, 2)) -> RunContext:
    """Carry out epochs of a run, on the ranks what they work on."""
    context = prepare(config)
    for node in RunPlan(config).nodes():
        if node.epoch in epochs and node.stage in ("rollout", "score", "value", "advantage", "optimize"):
            run = stage_run(context, node.stage, node.epoch, node.slot)
            if run.stage.on_ranks:
                crew.run(run, run.pending())
                run.finish()
            else:
                run.execute()
    return context


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in CHOSEN else pytest.mark.campaign) for case in CASES]
)
def test_two_ranks_train_policy_and_critic_as_one_process(
    crews: dict[int, RankExecutor], tmp_path: Path, case: str
) -> None:
    own = [setting for setting in CASES[case] if not setting.startswith("execution.")]
    images = case.startswith("images")
    one = trained(crews[1], config_of(tmp_path, "one", *own, images=images))
    two = trained(crews[2], config_of(tmp_path, "two", "execution.processes=2", *CASES[case], images=images))
    for name in (Weights.TRAINED.value, CRITIC):
        ours, theirs = stored(one, 2, name), stored(two, 2, name)
        assert ours.keys() == theirs.keys()
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 3e-5, name
    for epoch in (1, 2):
        tables = [stage_rows(each, epoch, "value") for each in (one, two)]
        for name in ("values", "reference_log_probs"):
            rows = [table.sort_by("sample_id").column(name).combine_chunks().flatten().to_numpy() for table in tables]
            assert abs(rows[0] - rows[1]).max() < 3e-5
    first = updates_of(two, 1)[0]
    assert (first["ratio_mean"], first["kl_before_k1"]) == (1.0, 0.0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("lora", ["null", "{rank: 2, alpha: 4, targets: [q_proj, lm_head]}"], ids=["full", "adapters"])
def test_tied_embeddings_train_as_in_one_process_from_one_strategy_to_the_other(
    crews: dict[int, RankExecutor], tmp_path: Path, lora: str
) -> None:
    own = ["run.epochs=3", f"model.lora={lora}", "critic.backbone=policy"]
    one = trained(crews[1], config_of(tmp_path, "one", *own, tied=True), (1, 2, 3))
    for epoch, strategy in ((1, "fsdp"), (2, "ddp"), (3, "fsdp")):
        ranks = ["execution.processes=2", f"execution.strategy={strategy}"]
        two = trained(crews[2], config_of(tmp_path, "two", *own, *ranks), (epoch,))
    name = Weights.TRAINED.value
    first, ours, theirs = stored(one, 1, name), stored(one, 3, name), stored(two, 3, name)
    assert ours.keys() == theirs.keys()
    assert "model.lm_head.weight" not in ours
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 3e-5
    assert max(float((ours[key] - first[key]).abs().max()) for key in ours) > 1e-4
