"""Files count by what they hold: a project that was moved goes on, and the path alone is no other setting."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flowmill.configs.errors import RunConflictError
from flowmill.configs.load import load_config
from flowmill.configs.paths import PATH_SETTINGS
from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.inputs.store_trust import HARMLESS, NAMES, pattern
from flowmill.tasks.runs.moves import RECORDED, moved
from flowmill.tasks.runs.opening import begin_run, find_run, finished_result, mark_finished, note_moves, open_run
from flowmill.tasks.runs.staleness import Freshness, statuses
from flowmill.tasks.specs.run_inputs import RunInputs
from tests.conftest import ROOT
from tests.support.inside import Make, prepare
from tests.support.settings import and_inside, section_fields
from tests.tasks.runs.test_contents import ROLLOUT, SCORE, aged, head, pending, score, write

#: Texts of the schema that lead somewhere, and to no file.
NO_FILES = {
    *("store.cache", "model.revision", "render.model.revision", "rewards.*.server.url"),
    *("tracking.uri", "tracking.registered_model", "execution.modules", "execution.sources"),
    # Texts of prompts, and names of what there is.
    *("rollout.tokens.stop", "rollout.tokens.system", "rollout.tokens.instruction", "render.answer"),
    *("rate.question", "rate.guidelines", "render.turns.comment", "render.turns.by", "render.turns.done"),
    *("data.keep", "data.split", "data.columns"),
    *("advantage.diversity", "model.attention", "render.model.attention"),
    # What draws takes none of these: 'flowmill check' refuses them.
    *("render.model.lora.start", "render.model.lora.targets"),
}


def test_every_setting_of_the_schema_that_may_name_a_file_is_known() -> None:
    texts = {
        pattern(name) for name, annotation in section_fields(RunConfig) if {str, Any} & set(and_inside(annotation))
    }
    # Options of components are looked through by ``flowmill.tasks.inputs.option_paths``.
    settings = {name for name in texts - HARMLESS - NAMES if not name.endswith((".name", ".options"))}
    # The config of another run, which records its own files.
    files = set(PATH_SETTINGS) - {"model.start_config"}
    assert settings - NO_FILES == files
    assert {*RECORDED, *(name for name in files if name.startswith(("data.", "prompts.")))} == files


SETTINGS = {
    "model.path": "model.path={place}",
    "model.single_file": "model.single_file={place}/model.safetensors",
    "model.single_file.transformer": "model.single_file={{transformer: {place}/model.safetensors}}",
    "model.lora.start": "model.lora={{start: {place}/model.safetensors}}",
    "critic.path": "critic.path={place}",
    "render.model.path": "render.model.path={place}",
    "render.model.single_file": "render.model.single_file={place}/model.safetensors",
}


def configured(tmp_path: Path, setting: str, place: Path) -> RunConfig:
    preset = "tiny_enhancer" if setting.startswith(("critic", "render")) else "tiny_sd3"
    more = {
        "render.model": ["render.model.build=null", f"render.model.path={place}"],
        "model": ["model.build=null", f"model.path={place}"],
        "critic": [],
    }
    base = next(found for name, found in more.items() if setting.startswith(name))
    overrides = [*base, SETTINGS[setting].format(place=place), f"store.root={tmp_path}/store"]
    return load_config(ROOT / "configs" / f"{preset}.yaml", overrides)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_path_to_the_same_contents_is_the_same_setting(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    save_file({"weight": torch.ones(1)}, one / "model.safetensors")
    (one / "config.json").write_text("{}")
    (one / "model_index.json").write_text("{}")
    before = configured(tmp_path, setting, one)
    store, run = ArtifactStore(before.store), RunFolder(ArtifactStore(before.store), "moved")
    of = RECORDED[setting.removesuffix(".transformer")]
    options = {of.option: of.now(RunInputs(store, before, run))}
    monkeypatch.setattr(run, "entries_of", lambda *node: [SimpleNamespace(ref="made")] if node == of.node else [])
    monkeypatch.setattr(store, "manifest", lambda ref: SimpleNamespace(options=options))
    one.rename(two)
    given = configured(tmp_path, setting, two)
    assert setting in moved(store, run, before, given)
    save_file({"weight": torch.zeros(1)}, two / "model.safetensors")
    aged(two / "model.safetensors", 30)
    assert setting not in moved(store, run, before, given), "others there are another setting"
    assert setting not in moved(store, run, before, configured(tmp_path, setting, tmp_path / "nowhere"))


def test_a_file_of_a_reward_at_another_path_makes_no_score_anew(make_config: Make, tmp_path: Path) -> None:
    write(tmp_path / "head.safetensors", 1.0)
    latents = "rollout.media={format: none, latents: true}"
    first = make_config(head(tmp_path / "head.safetensors"), latents)
    context = prepare(first)
    score(context)
    made = context.chain.ref(SCORE)
    mark_finished(context, {"mean": 0.5})
    (tmp_path / "heads").mkdir()
    (tmp_path / "head.safetensors").rename(tmp_path / "heads" / "head.safetensors")
    elsewhere = make_config(head(tmp_path / "heads" / "head.safetensors"), latents)
    again = begin_run(elsewhere)
    assert again.chain.ref(SCORE) == made
    assert [pending(again, node) for node in (ROLLOUT, SCORE)] == [0, 0]
    write(tmp_path / "heads" / "head.safetensors", 2.0, age_s=30)
    with pytest.raises(RunConflictError, match=r"rewards\.0\.options\.head: '.*/head.safetensors' -> '.*/heads/"):
        begin_run(make_config(head(tmp_path / "heads" / "head.safetensors"), latents))


def test_a_finished_run_whose_project_was_moved_has_nothing_to_do(
    make_config: Make, tiny_base: Path, tmp_path: Path
) -> None:
    """Its record says where the files are now, and only a config that is given says so."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    shutil.copytree(tiny_base, one / "model")
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.txt").rename(one / f"{name}.txt")
    settings = ["model.path={}/model", "prompts.train={}/train.txt", "prompts.heldout={}/heldout.txt"]
    context = prepare(make_config(*(each.format(one) for each in settings)))
    mark_finished(context, {"mean": 0.5})
    before = [each.artifact for each in statuses(context.chain)]
    one.rename(two)
    given = make_config(*(each.format(two) for each in settings))
    again = find_run(given)
    assert again is not None
    assert finished_result(again) == {"mean": 0.5}
    assert [each.artifact for each in statuses(again.chain)] == before
    assert {each.state for each in statuses(again.chain) if each.node.stage in ("base", "preprocess")} == {
        Freshness.FRESH
    }
    note_moves(again)
    known = open_run(given.store.root, "small").config
    assert (known.model.path, known.prompts.train) == (f"{two}/model", f"{two}/train.txt")
    (two / "train.txt").write_text("one other prompt\n")
    with pytest.raises(RunConflictError, match="hold other prompts now"):
        begin_run(make_config(*(each.format(two) for each in settings)))
