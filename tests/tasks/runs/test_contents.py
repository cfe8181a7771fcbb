"""The content of local files is part of the results: other files at the same path make scores again, rollouts stay."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from flowmill.configs import introspection
from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.registry import Table, resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.engines import ENGINES
from flowmill.models.maths import KERNELS, PLANS, SOLVERS
from flowmill.models.policies import POLICIES
from flowmill.models.quickstart import BUILDERS
from flowmill.models.rewards import ARGUMENTS, REWARDS
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.trajectories import TRAJECTORY_STORES
from flowmill.tasks.advantages.estimators import ESTIMATORS
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from flowmill.tasks.execution.jobs import JobSession, JobSpec
from flowmill.tasks.execution.launchers import LAUNCHERS
from flowmill.tasks.execution.runners import RUNNERS
from flowmill.tasks.execution.session import Session
from flowmill.tasks.inputs.option_paths import changed_places
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.reports.comparison import compare
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, finished_result, mark_finished, open_run
from flowmill.tasks.runs.progress import Silent
from flowmill.tasks.runs.staleness import Freshness, explain, status_of
from flowmill.tasks.runtime.critic import fresh_critic
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.input_hashes import InputContents
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.specs.run_inputs import RunInputs
from flowmill.tasks.training.optimizers import OPTIMIZERS
from tests.conftest import ROOT
from tests.support.inside import Make, prepare, run_stage, session_of, stage_run

ROLLOUT, SCORE, JUDGE = Node(1, "rollout"), Node(1, "score", "head"), Node(0, "judge", "head")


def write(file: Path, value: float, *, age_s: float = 60) -> None:
    """Write a head whose scores are the sum of latents times a value."""
    save_file({"0.weight": torch.full((1, 4 * 8 * 16), value), "0.bias": torch.zeros(1)}, file)
    aged(file, age_s)


def aged(file: Path, age_s: float) -> None:
    then = time.time_ns() - int(age_s * 1e9)
    os.utime(file, ns=(then, then))


def head(path: object, *, name: str = "latent_head") -> str:
    return f"rewards=[{{name: {name}, label: head, options: {{head: '{path}'}}}}]"


@pytest.fixture
def scored(make_config: Make, tmp_path: Path) -> RunConfig:
    """A config whose first epoch is rolled out and scored."""
    write(tmp_path / "head.safetensors", 1.0)
    config = make_config(head(tmp_path / "head.safetensors"), "rollout.media={format: none, latents: true}")
    score(prepare(config))
    return config


def score(context: RunContext) -> None:
    for node in (ROLLOUT, SCORE):
        run_stage(context, node.stage, 1, node.slot)


def pending(context: RunContext, node: Node) -> int:
    return len(stage_run(context, node.stage, node.epoch, node.slot).pending())


def mean(context: RunContext) -> float:
    manifest = context.store.manifest(context.chain.require(*SCORE).ref)
    assert manifest is not None
    return float(manifest.summary["mean"])


def test_of_another_file_at_the_same_path_scores_are_made_anew_and_rollouts_are_not(
    scored: RunConfig, tmp_path: Path
) -> None:
    same = begin_run(scored)
    assert [pending(same, node) for node in (ROLLOUT, SCORE)] == [0, 0]
    first, file = mean(same), tmp_path / "head.safetensors"
    mark_finished(same, {"mean": first})
    assert finished_result(begin_run(scored)) == {"mean": first}
    write(file, 2.0, age_s=30)
    other = begin_run(scored)
    assert finished_result(other) is None
    assert pending(other, ROLLOUT) == 0
    assert pending(other, SCORE) == 2
    said = f"reward 'latent_head': the file at '{file}' (option 'head') has other contents"
    assert explain(other.chain, SCORE)[-1] == f"score[head]@1 is stale: {said}"
    score(other)
    assert mean(other) == pytest.approx(2 * first)
    write(file, 1.0, age_s=20)
    assert mean(begin_run(scored)) == first, "what was made of the first file is found again"


def test_where_a_file_is_gone_or_was_never_given_here_it_is_as_recorded(scored: RunConfig, tmp_path: Path) -> None:
    file, root = tmp_path / "head.safetensors", scored.store.root
    own = begin_run(scored).chain.ref(JUDGE)
    write(file, 2.0, age_s=30)
    assert begin_run(scored).chain.ref(JUDGE) != own
    assert status_of(open_run(root, "small", reads=True, trusted=True).chain, SCORE).state is Freshness.FRESH
    remember(scored)
    assert status_of(open_run(root, "small", reads=True).chain, SCORE).state is Freshness.STALE
    file.unlink()
    for gone in (open_run(root, "small", reads=True), begin_run(scored)):
        assert status_of(gone.chain, SCORE).state is Freshness.FRESH
        assert pending(begin_run(scored), SCORE) == 0
        assert gone.chain.ref(JUDGE) == own, "as another stage recorded it, where this one has made nothing"


def test_what_was_made_before_contents_counted_stays_until_a_file_changes(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "head.safetensors"
    write(file, 1.0)
    latents = "rollout.media={format: none, latents: true}"
    config = make_config(head(file), latents)
    with monkeypatch.context() as before:
        before.setattr(InputContents, "of", lambda *_: {})
        old = prepare(config)
        score(old)
        ref = old.chain.ref(SCORE)
    for there in (True, False):
        if not there:
            file.rename(tmp_path / "away")
        now = begin_run(config)
        assert now.chain.ref(SCORE) == ref
        assert pending(now, SCORE) == 0
    write(file, 1.0, age_s=-10)
    changed = begin_run(config)
    assert status_of(changed.chain, SCORE).state is Freshness.STALE
    assert explain(changed.chain, SCORE)[-1].endswith("changed since, and its contents were not recorded")
    other = Chain(RunInputs(old.store, make_config(head(file), latents, "rollout.steps=2"), old.run))
    assert explain(other, SCORE)[-1] == "score[head]@1 is stale: input rollout@1 changed"


def test_only_a_deep_look_sees_a_file_whose_time_was_set_back(scored: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "head.safetensors"
    stat, first = file.stat(), begin_run(scored).chain.ref(SCORE)
    write(file, 2.0)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert begin_run(scored).chain.ref(SCORE) == first
    assert changed_places(scored, tuple) == [str(file)]
    assert changed_places(scored, tuple) == []
    assert begin_run(scored).chain.ref(SCORE) != first


def test_a_file_replaced_after_a_run_has_looked_at_it_is_not_read_under_the_former_name(
    scored: RunConfig, tmp_path: Path
) -> None:
    file = tmp_path / "head.safetensors"
    context = begin_run(scored)
    forced = stage_run(context, "score", 1, "head", force=True)
    job = JobSpec.of(forced).encoded()
    write(file, 2.0, age_s=30)
    said = f"reward 'latent_head': the file at '{file}' (option 'head') has other contents than the run was started"
    for session in (session_of(context), JobSession(Silent).of(JobSpec.parse(job))):
        with pytest.raises(ConfigError, match=re.escape(said)):
            session.host.rewards.of(scored.rewards[0])
    write(file, 1.0, age_s=20)
    reward = session_of(context).host.rewards.of(scored.rewards[0])
    write(file, 3.0, age_s=10)
    assert session_of(context).host.rewards.of(scored.rewards[0]) is reward, "it is loaded already"


@pytest.mark.parametrize("slot", ["model", "teacher", "critic"])
def test_a_model_replaced_after_a_run_has_looked_at_it_is_not_read(
    slot: str, make_config: Make, tiny_base: Path, tmp_path: Path
) -> None:
    mine = shutil.copytree(tiny_base, tmp_path / "mine")
    named = {"model": f"model.path='{mine}'", "critic": f"critic.path='{mine}'"}
    named["teacher"] = f"optimize.algorithm={{name: opd, options: {{teacher: '{mine}'}}}}"
    context = prepare(make_config(named[slot]))
    job = JobSpec.of(stage_run(context, "rollout", 1)).encoded()
    read: Callable[[Session], object] = {
        "model": lambda session: session.host.fresh(),
        "teacher": lambda session: session.host.give_teacher(session.host.fresh(), str(mine)),
        "critic": lambda session: fresh_critic(session.context, torch.device("cpu"), None),
    }[slot]
    config = mine / "transformer" / "config.json"
    config.write_text(config.read_text() + " ")
    for session in (Session(context), JobSession(Silent).of(JobSpec.parse(job))):
        with pytest.raises(ConfigError, match=r"mine.* has other contents than the run was started with"):
            read(session)
    assert JobSpec.parse(job).is_of(context)
    assert not JobSpec.parse(job).is_of(RunContext(context.store, context.config, context.run))


def test_a_snapshot_of_a_hub_and_a_copy_of_its_files_are_one_model(make_config: Make, tmp_path: Path) -> None:
    repository = tmp_path / "models--o--n"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1").write_text("{}")
    (snapshot / "model_index.json").symlink_to("../../blobs/1")
    context = begin_run(make_config(f"model.path='{snapshot}'"))
    other = RunContext(context.store, context.config, context.run)
    other.adopt(context.identities)
    (snapshot / "model_index.json").unlink()
    shutil.copy(repository / "blobs" / "1", snapshot / "model_index.json")
    other.check_model(context.config.model, "")


def test_images_of_prompts_that_are_added_change_no_run(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("one.png", "two.png"):
        Image.new("RGB", (32, 16)).save(tmp_path / "images" / name)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "like": "one.png"}\n')
    options = f"{{folder: '{tmp_path / 'images'}', column: like, by: ssim}}"
    config = make_config(f"rewards=[{{name: image_similarity, options: {options}}}]", f"prompts={{train: '{prompts}'}}")
    context = begin_run(config)
    job = JobSpec.of(stage_run(context, "base", 0)).encoded()
    prompts.write_text(prompts.read_text() + '{"prompt": "b", "like": "two.png"}\n')
    JobSession(Silent).of(JobSpec.parse(job)).host.rewards.of(config.rewards[0])


def test_two_runs_say_what_held_something_else(scored: RunConfig, tmp_path: Path) -> None:
    write(tmp_path / "head.safetensors", 2.0, age_s=30)
    other = scored.model_copy(update={"run": scored.run.model_copy(update={"name": "other"})})
    score(prepare(other))
    contexts = [open_run(scored.store.root, name, reads=True, trusted=True) for name in ("small", "other")]
    (said,) = compare(*contexts).contents
    assert said.startswith("reward 'latent_head': the file at ")
    assert compare(contexts[0], contexts[0]).contents == []


def targets(config: RunConfig, *nodes: Node) -> list[str]:
    store = ArtifactStore(config.store)
    chain = RunContext(store, config, RunFolder(store, "small")).chain
    return [str(chain.ref(node)) for node in nodes]


def test_a_hub_id_and_what_is_not_named_change_nothing(make_config: Make, tmp_path: Path) -> None:
    config = make_config("rewards=[{name: clip_score, label: head, options: {model: openai/clip}}]")
    store = ArtifactStore(config.store)
    identity = RunContext(store, config, RunFolder(store, "small")).chain.identity(SCORE)
    assert [place.path for place in identity.places()] == ["openai/clip"]
    assert identity.counted(()) == identity.options()


def test_the_weights_of_a_teacher_are_part_of_the_policy(make_config: Make, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    (teacher / ".cache").mkdir(parents=True)
    (teacher / "model.safetensors").write_bytes(b"one")
    nodes = (ROLLOUT, Node(1, "advantage"), Node(1, "optimize"))
    config = make_config(f"optimize.algorithm={{name: opd, options: {{teachers: {{a: '{teacher}'}}}}}}")
    first = targets(config, *nodes)
    (teacher / ".cache" / "lock").touch()
    assert targets(config, *nodes) == first
    (teacher / "model.safetensors").write_bytes(b"other")
    assert [a == b for a, b in zip(targets(config, *nodes), first, strict=True)] == [True, True, False]


def test_a_reward_inside_another_and_one_that_training_asks_count(make_config: Make, tmp_path: Path) -> None:
    file = tmp_path / "head.safetensors"
    inner = f"rewards=[{{name: rank, label: head, options: {{reward: aesthetic, options: {{head: '{file}'}}}}}}]"
    refl = ("optimize.algorithm={name: refl}", head(file, name="aesthetic"))
    found: dict[str, list[list[str]]] = {"inner": [], "refl": []}
    for value in (1.0, 2.0):
        write(file, value)
        aged(file, 60 + value)
        found["inner"].append(targets(make_config(inner), SCORE))
        found["refl"].append(targets(make_config(*refl), Node(1, "rollout"), Node(1, "optimize")))
    assert found["inner"][0] != found["inner"][1]
    assert [one == other for one, other in zip(*found["refl"], strict=True)] == [True, False]


def test_of_a_folder_that_prompts_name_files_of_those_count(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("named.png", "beside.png"):
        (tmp_path / "images" / name).write_bytes(b"one")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "like": "named.png"}\n{"prompt": "b", "like": "gone"}\n')
    options = f"{{folder: '{tmp_path / 'images'}', column: like, by: ssim}}"
    config = make_config(
        f"rewards=[{{name: image_similarity, label: head, options: {options}}}]",
        f"prompts={{train: '{tmp_path / 'prompts.jsonl'}'}}",
    )
    first = targets(config, SCORE)
    (tmp_path / "images" / "beside.png").write_bytes(b"another")
    assert targets(config, SCORE) == first
    (tmp_path / "images" / "named.png").write_bytes(b"another")
    assert targets(config, SCORE) != first


def annotated(table: Mapping[str, str], *, given: int = 0) -> dict[str, list[str]]:
    """Return the options of a table's components that name something, by component."""
    kinds = {name: introspection.options(import_string, skipped=given) or {} for name, import_string in table.items()}
    named = {name: [option for option, kind in each.items() if "Place" in kind] for name, each in kinds.items()}
    return {name: options for name, options in named.items() if options}


def counting(config: RunConfig) -> Iterator[tuple[str, set[str]]]:
    """Yield every stage of a run, and the options whose contents count for it."""
    store = ArtifactStore(config.store)
    chain = RunContext(store, config, RunFolder(store, "small")).chain
    for node in RunPlan(config).nodes():
        yield node.stage, {place.option for place in chain.identity(node).places()}


def with_options(tmp_path: Path, changes: Mapping[str, Any], preset: str = "tiny_sd3") -> RunConfig:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"extends": str(ROOT / "configs" / f"{preset}.yaml"), **changes}))
    return load_config(file, [f"store.root={tmp_path}"])


def test_every_option_of_a_reward_that_names_something_counts_where_it_scores(tmp_path: Path) -> None:
    found = annotated(REWARDS, given=len(ARGUMENTS))
    assert {name: len(options) for name, options in found.items()}.items() >= {"hpsv3": 3, "dina_lrm": 3}.items()
    for name, options in found.items():
        reward = {"name": name, "options": dict.fromkeys(options, "owner/name")}
        for changes in (
            {"rewards": [reward]},
            {"monitors": [reward]},
            {"evaluate": {"judges": [reward]}},
            {"rewards": [reward], "optimize": {"algorithm": {"name": "reward_gradient"}}},
        ):
            counted = dict[str, set[str]]()
            for stage, names in counting(with_options(tmp_path, changes)):
                counted[stage] = counted.get(stage, set()) | names
            stages = {stage for stage, names in counted.items() if names == {*options}}
            algorithm = "optimize" in changes
            wanted = {"judge"} if "evaluate" in changes else {"score"} if "monitors" in changes else {"score", "judge"}
            assert stages == wanted | ({"gradient"} if algorithm else set()), (name, changes)


def test_every_option_of_an_algorithm_that_names_something_counts_where_it_trains(tmp_path: Path) -> None:
    found = annotated(ALGORITHMS)
    assert found == {"opd": ["teacher", "teachers"]}
    assert annotated(TOKEN_ALGORITHMS) == {}
    for name, options in found.items():
        for option in options:
            value: object = {"a": "here"} if option == "teachers" else "here"
            changes = {"optimize": {"algorithm": {"name": name, "options": {option: value}}}}
            counted = {stage for stage, names in counting(with_options(tmp_path, changes)) if names == {option}}
            assert counted == {"optimize"}, (name, option)


@pytest.mark.parametrize(
    "table",
    [BUILDERS, ENGINES, ESTIMATORS, KERNELS, LAUNCHERS, OPTIMIZERS, PLANS, RUNNERS, SOLVERS, TRAJECTORY_STORES],
    ids=lambda table: table.like,
)
def test_no_option_of_another_component_names_what_no_identity_holds(table: Table) -> None:
    assert annotated(table) == {}, "say in the places() of the stage that it is an option of that it counts"


def test_no_option_of_a_family_names_what_no_identity_holds() -> None:
    families = {name: resolve(POLICIES, name, label="family").options_type for name in POLICIES}
    assert annotated({name: f"{kind.__module__}:{kind.__name__}" for name, kind in families.items()}) == {}
