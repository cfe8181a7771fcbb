"""Artifact ids of the stages of presets, computed from their configs alone; ``tests/pins/ids.json`` pins them.

``python -m tests.support.pins`` writes the file anew, for presets whose config was changed on purpose.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from flowmill.configs.load import load_config
from flowmill.configs.reward_fit import FitConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.fitting.fit import fit_reward
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.specs.run_inputs import RunInputs

ROOT = Path(__file__).parents[2]
PINS = ROOT / "tests" / "pins" / "ids.json"
FIT = "reward fit"
PRESETS = (
    *("digits", "digits_branch", "digits_nft", "digits_replay", "digits_dpo", "words"),
    *("tiny_sd3", "tiny_sd15", "tiny_flux1", "tiny_flux1_kontext", "tiny_wan22", "tiny_ltx2"),
    *("sd35_medium", "sd35_opd", "flux1_dance", "wan22_a14b"),
    *("digits_reward_gradient", "digits_refl", "digits_direct_align", "digits_sdpo"),
    *("digits_sft", "digits_given_dpo", "addition_sft", "qwen_05b_given_dpo"),
    *("addition_grpo", "digit_sums_grpo", "qwen_7b_grpo", "addition_ppo", "lexicon_ppo"),
    *("tiny_enhancer", "tiny_edit_enhancer", "tiny_agent", "tiny_agent_sees", "flux1_enhancer"),
    *("qwen25_vl_3b_grpo", "unified_digits_grpo", "janus_pro_1b_grpo", "digits_taste", "addition_taste"),
)


def _model_identity(path: str, revision: str | None, **_: object) -> dict[str, str]:
    return {"hub": path, "commit": revision or "0" * 40}


def preset_ids(preset: str, root: Path) -> dict[str, str]:
    """Return the artifact of every stage of a run of two epochs, in order; nothing is made, no hub is asked."""
    config = load_config(ROOT / "configs" / f"{preset}.yaml", [f"store.root={root}", "run.epochs=2"])
    store = ArtifactStore(config.store)
    identities = mock.patch("flowmill.tasks.specs.run_inputs.model_identity", _model_identity)
    # Templates of Qwen write nothing around answers.
    with identities, mock.patch.object(RunInputs, "around_answers", ()):
        chain = Chain(RunInputs(store, config, RunFolder(store, preset)))
        return {str(node): str(chain.ref(node)) for node in chain.nodes()}


class _Fit(Exception):
    """The artifact of a fit, raised in place of its work."""


def fit_id(root: Path) -> str:
    """Return the artifact of a fitted reward, without the fit."""

    def raised(store: ArtifactStore, ref: ArtifactRef) -> None:
        raise _Fit(str(ref))

    data = {
        "data": f"{ROOT}/configs/prompts/reasoning-pairs.jsonl",
        "share": 0.4,
        "backbone": {"name": "text", "options": {"model": "owner/model"}},
        "store": {"root": str(root)},
    }
    with mock.patch.object(ArtifactStore, "manifest", raised):
        try:
            fit_reward(FitConfig.model_validate(data))
        except _Fit as found:
            return str(found)
    raise AssertionError("a fit asks for the manifest of its artifact first")


def changed(pinned: dict[str, dict[str, str]], root: Path) -> Iterator[str]:
    """Yield the first stage of each preset whose artifact has another id than the pinned one."""
    for preset, ids in pinned.items():
        current = {"fit": fit_id(root)} if preset == FIT else preset_ids(preset, root)
        nodes = [node for node in {**current, **ids} if current.get(node) != ids.get(node)]
        if nodes:
            yield f"{preset}: {nodes[0]} was {ids.get(nodes[0])}, is {current.get(nodes[0])}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ids = {preset: preset_ids(preset, Path(folder)) for preset in PRESETS}
        PINS.write_text(json.dumps({**ids, FIT: {"fit": fit_id(Path(folder))}}, indent=1) + "\n")
