"""``check`` warns where a loss of the forward process meets a base that was distilled to few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowmill.configs.load import load_config
from flowmill.models.policies.few_steps import few_step_sign
from flowmill.tasks.algorithms import ALGORITHMS
from flowmill.tasks.checks.notes import training_notes
from flowmill.tasks.inputs.components import make_algorithm
from flowmill.tasks.specs.plan import RunPlan
from tests.conftest import ROOT

DISTILLED = {
    "flux1": "black-forest-labs/FLUX.1-schnell",
    "flux2_klein": "black-forest-labs/FLUX.2-klein-9B",
    "z_image": "Tongyi-MAI/Z-Image-Turbo",
    "sd3": "stabilityai/stable-diffusion-3.5-large-turbo",
    "sdxl": "ByteDance/SDXL-Lightning",
    "sd15": "SimianLuo/LCM_Dreamshaper_v7",
    "sana": "Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers",
    "hunyuan_video15": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v_step_distilled",
    "ltx2": "Lightricks/LTX-2.3-Distilled",
    "qwen_image": "files/Qwen-Image-Lightning-4steps-V1.0.safetensors",
    "wan21": "lightx2v/Wan2.1-T2V-14B-StepDistill-CfgDistill",
}


@pytest.mark.parametrize("family", DISTILLED)
def test_published_distilled_bases_are_known_by_name(family: str) -> None:
    assert few_step_sign(family, DISTILLED[family]) is not None


def test_bases_of_full_size_presets_that_are_not_distilled_are_not_warned_of() -> None:
    for preset in sorted((ROOT / "configs").glob("*.yaml")):
        path = load_config(preset).model.path
        if path is not None:
            distilled = path in ("Tongyi-MAI/Z-Image-Turbo", "black-forest-labs/FLUX.2-klein-9B")
            assert (few_step_sign(load_config(preset).model.policy, path) is not None) is distilled, path


@pytest.mark.parametrize(
    ("family", "file", "about"),
    [
        ("flux1", "transformer/config.json", {"guidance_embeds": False}),
        ("flux2_klein", "model_index.json", {"is_distilled": True}),
        ("sd15", "scheduler/scheduler_config.json", {"_class_name": "LCMScheduler"}),
    ],
)
def test_folders_say_it_in_their_files(tmp_path: Path, family: str, file: str, about: dict[str, Any]) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    for written, expected in ((about, True), ({key: None for key in about}, False)):
        path.write_text(json.dumps(written))
        sign = few_step_sign(family, str(tmp_path))
        assert (sign is not None) is expected
        assert not expected or (sign or "").endswith(f"in {file}")
    # A model whose guidance is no input lacks that one by nature.
    path.write_text(json.dumps({"guidance_embeds": False}))
    assert few_step_sign("qwen_image", str(tmp_path)) is None


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_losses_of_the_forward_process_get_the_warning_and_others_do_not(algorithm: str) -> None:
    options = ", options: {teacher: folder}" if algorithm == "opd" else ""
    given = [f"optimize.algorithm={{name: {algorithm}{options}}}"]
    config = load_config(ROOT / "configs" / "z_image_turbo.yaml", given)
    notes = [note for note in training_notes(RunPlan(config), updates=4) if "distilled to few steps" in note]
    assert len(notes) == (make_algorithm(config).requires.data == "forward")
    assert all(f"'{algorithm}' trains on samples that are noised again" in note for note in notes)


def test_start_adapters_are_read_as_bases_are() -> None:
    given = ["optimize.algorithm={name: nft}", "model.lora.start=Qwen-Image-Lightning-8steps-V1.1.safetensors"]
    found = training_notes(RunPlan(load_config(ROOT / "configs" / "qwen_image.yaml", given)), updates=4)
    assert any(note.startswith("model.lora.start 'Qwen-Image-Lightning-8steps-V1.1") for note in found)
