"""Clips that start from one image and end with another, against ``WanImageToVideoPipeline``'s own ``last_image``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline
from PIL import Image

from flowmill.configs.errors import PromptError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Sampler, ode_plan, sample
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.wan_i2v import Wan21ImageToVideo, Wan22ImageToVideo
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.weight_sources import exported_folder
from tests.conftest import ROOT
from tests.support.inside import evaluate, prepare, run_epoch, run_stage
from tests.tasks.stages.test_presets import evaluated

PROMPTS = ["a red cube", "two cats and a dog"]
ENDS = [np.random.default_rng(seed).integers(0, 256, (48, 80, 3), dtype=np.uint8) for seed in (0, 1)]
FAMILIES = {"wan21_i2v": Wan21ImageToVideo, "wan22_i2v": Wan22ImageToVideo}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wan 2.2, Wan 2.1 that sees the first frame, and Wan 2.1 that sees both."""
    quiet_libraries()
    found = {}
    for name in ("wan21_i2v", "wan22_i2v", "both"):
        # CLIP makes five tokens of an image.
        both = {"transformer": {"pos_embed_seq_len": 10}} if name == "both" else {}
        pipeline = build_tiny("wan21_i2v" if name == "both" else name, changes=both)
        if name == "both":
            torch.nn.init.normal_(pipeline.transformer.condition_embedder.image_embedder.pos_embed)
        found[name] = tmp_path_factory.mktemp("wan") / name
        pipeline.save_pretrained(found[name])
    return found


def policy_of(name: str, folders: dict[str, Path], frames: int = 5) -> Any:
    family = FAMILIES["wan21_i2v" if name == "both" else name]
    settings = DiffusionSettings(height=32, width=32, frames=frames, guidance_scale=3.0)
    return family.load(folders[name], settings, frozenset(Part), {"max_sequence_length": 16})


@pytest.mark.parametrize("name", ["wan22_i2v", "both"])
def test_the_ode_is_the_pipelines_with_a_last_image(name: str, folders: dict[str, Path]) -> None:
    policy, steps, start = policy_of(name, folders), 4, [torch.Generator().manual_seed(row) for row in (0, 1)]
    images = [ENDS, ENDS]
    cond = Conditioning(policy.encode(PROMPTS, images), policy.encode(["", ""], images))
    sampler = Sampler(kernel=ODE(), solver=Euler())
    noise, sigmas = policy.initial_latents(start), policy.sigmas(steps)
    ours = sample(policy, cond, noise, sigmas, sampler=sampler, plans=[ode_plan()] * 2, noise=lambda *_: noise).final
    pipeline = WanImageToVideoPipeline.from_pretrained(folders[name])
    call = policy.pipeline_call(steps, None)
    assert call.last_frame
    assert call.scheduler is not None
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(**call.scheduler.options)
    first, last = (Image.fromarray(end) for end in ENDS)
    drawn = {}
    for ends in (True, False) if name == "wan22_i2v" else (True,):
        drawn[ends] = pipeline(
            image=first,
            last_image=last if ends else None,
            prompt=PROMPTS,
            negative_prompt="",
            generator=[torch.Generator().manual_seed(row) for row in (0, 1)],
            output_type="latent",
            **call.arguments,
        ).frames
    assert torch.equal(ours, drawn[True])
    if name == "wan22_i2v":
        # Prompts of one image and of two are one batch.
        mixed = policy.encode(PROMPTS, [ENDS, ENDS[:1]])
        for key, rows in policy.encode(PROMPTS, [ENDS[:1]] * 2).items():
            assert torch.equal(mixed[key][1], rows[1])
        assert not torch.equal(drawn[True], drawn[False])


@pytest.mark.parametrize(
    ("name", "images", "frames", "message"),
    [
        (
            "wan21_i2v",
            2,
            5,
            "2 images, the first and the last frame, but this model sees the first alone.*or use Wan 2.1 FLF2V",
        ),
        ("both", 1, 5, "1 image, the first frame, but this model sees both its ends.*Name the frames it takes"),
        (
            "wan22_i2v",
            2,
            1,
            "2 images, the first and the last frame, but model.frames is 1.*Raise it, or name one image",
        ),
    ],
)
def test_frames_that_a_model_does_not_see_are_refused(
    name: str, images: int, frames: int, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(PromptError, match=rf"prompts\.image: prompt 'a red cube' comes with {message}"):
        policy_of(name, folders, frames).encode(PROMPTS[:1], [ENDS[:images]])
    family = "wan21_i2v" if name == "both" else name
    config = clips(
        tmp_path, family, images, f"model.path={folders[name]}", "model.build=null", f"model.frames={frames}"
    )
    with pytest.raises(PromptError, match=rf"prompts\.image: prompt 'clip 0' comes with {message}"):
        check_config(config)


def test_three_frames_and_two_where_the_pipeline_takes_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"comes with 3 images, but model.policy 'wan22_i2v' takes 2.*first and the"):
        check_config(clips(tmp_path, "wan22_i2v", 3))
    with pytest.raises(PromptError, match=r"comes with 2 images, but model.policy 'wan22_ti2v_i2v' takes 1"):
        check_config(clips(tmp_path, "wan22_ti2v_i2v", 2))
    check_config(clips(tmp_path, "wan22_i2v", 2))


def clips(folder: Path, family: str, images: int, *overrides: str) -> RunConfig:
    """Return the config of a tiny run whose prompts come with images of their own."""
    rows = []
    for number in range(2):
        names = [f"{number}-{end}.png" for end in range(images)]
        for end, name in enumerate(names):
            Image.new("RGB", (40, 32), (99 * number, 80 * end, 9)).save(folder / name)
        rows.append(json.dumps({"prompt": f"clip {number}", "images": names}))
    (folder / "clips.jsonl").write_text("\n".join(rows))
    given = [f"prompts={{train: {folder / 'clips.jsonl'}, image: images}}", f"store.root={folder / 'store'}"]
    few = ["rollout.prompts_per_epoch=2", "rollout.group_size=2", "run.name=clips", "run.epochs=1"]
    return load_config(ROOT / "configs" / f"tiny_{family}.yaml", [*given, *few, *overrides])


@pytest.mark.slow
def test_a_whole_run_exports_a_call_that_ends_with_the_last_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet_libraries()
    context = prepare(clips(tmp_path, "wan22_i2v", 2))
    run_epoch(context, 1)
    evaluate(context, 1)
    run_stage(context, "export", 1)
    place = tmp_path / "place"
    shutil.copytree(exported_folder(context.store, context.chain.require(1, "export").ref), place)
    usage = json.loads((place / "generation.json").read_text())
    assert usage["last_image"] == {"file": "images/input-2.png", "size": None}
    (place / usage["base_model"]).symlink_to(context.base_folder)
    monkeypatch.chdir(place)
    code = (place / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "image=image, last_image=last_image, " in code
    run: Callable[[dict[str, Any]], None] = lambda names: exec(compile(code, "card", "exec"), names)  # noqa: E731
    found: dict[str, Any] = {}
    run(found)
    ours = evaluated(context)[0]["media"].astype(float)
    assert np.abs(np.stack([np.asarray(frame) for frame in found["frames"]]) - ours).max() <= 1
