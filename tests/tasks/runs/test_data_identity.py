"""Settings of the model that change samples also change what is trained on ingested ones, which no rollout precedes;
identities of files that are gone are the recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowmill.configs.load import load_config
from flowmill.configs.model import LoraSection, ModelSection
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.run_inputs import RunInputs
from tests.conftest import ROOT
from tests.tasks.runs.test_fingerprints import plain_settings

PAIRS = f"data={{train: {ROOT}/configs/prompts/digits-pairs.parquet, chosen: chosen, rejected: rejected}}"
UNIFIED = [PAIRS, "prompts.train=null", "optimize.algorithm=sft"]
OTHERS = ("guidance_scale=3", "attention=my_backend", "options={other: 1}", "lora={rank: 3, alpha: 5}")
#: A preset with rollouts, one with data, its overrides, and settings of rollouts alone: SFT and texts use no guidance.
CASES = {
    "digits": ("digits_sft", [], {"guidance_scale"}),
    "digits_crd": ("digits_given_dpo", [], set[str]()),
    "tiny_flux1_kontext": ("tiny_edit_sft", [], set[str]()),
    "addition_grpo": ("addition_sft", [], {"guidance_scale"}),
    "unified_digits_grpo": ("unified_digits_grpo", UNIFIED, {"guidance_scale"}),
}


def settings(preset: str) -> Iterator[str]:
    """Yield an override of each setting of a preset's model."""
    model = load_config(ROOT / "configs" / f"{preset}.yaml").model
    for name, other in plain_settings(ModelSection, model):
        yield f"{name}={other}"
    yield from OTHERS


def moved(root: Path, preset: str, node: Node, both: list[str], change: str) -> bool:
    """Return whether a setting of the model changes an artifact."""
    refs = []
    for overrides in (both, [*both, f"model.{change}"]):
        config = load_config(ROOT / "configs" / f"{preset}.yaml", [f"store.root={root}", *overrides])
        store = ArtifactStore(config.store)
        refs.append(Chain(RunInputs(store, config, RunFolder(store, "run"))).ref(node))
    return refs[0] != refs[1]


@pytest.mark.parametrize("preset", CASES)
def test_settings_of_a_model_that_change_rollouts_change_policies_trained_on_data(preset: str, tmp_path: Path) -> None:
    with_data, overrides, rollouts_alone = CASES[preset]
    changes = [each for each in settings(preset) if moved(tmp_path, preset, Node(1, "rollout"), [], each)]
    assert set(OTHERS[1:]) < set(changes)
    missed = {each for each in changes if not moved(tmp_path, with_data, Node(1, "optimize"), overrides, each)}
    assert {each.partition("=")[0] for each in missed} == rollouts_alone


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("gone", ["/nowhere/x.safetensors", "~nosuch/x.safetensors"])
def test_files_that_are_gone_have_their_recorded_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str, reads: bool
) -> None:
    config = load_config(ROOT / "configs" / "digits.yaml", [f"store.root={tmp_path}"])
    # As in a record: a config file with such a path is refused.
    model = config.model.model_copy(update={"path": "x/y", "single_file": gone, "lora": LoraSection(start=gone)})
    critic = config.critic.model_copy(update={"path": gone})
    config = config.model_copy(update={"model": model, "critic": critic})
    store = ArtifactStore(config.store)
    facts = RunInputs(store, config, RunFolder(store, "run"), reads=reads)
    monkeypatch.setattr(RunInputs, "recorded", lambda *place: {"file": "recorded"})
    found = (facts.single_file_identity(model, ""), facts.adapter_identity, facts.critic_identity)
    assert found == ({"file": "recorded"},) * 3
