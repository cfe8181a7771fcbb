"""Exports: plain diffusers loads them with one call, and the card's snippet draws what the evaluation drew."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from diffusers import DiffusionPipeline, ModularPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowmill.configs.errors import CorruptError
from flowmill.configs.load import load_config
from flowmill.configs.registry import resolve
from flowmill.configs.schema import PromptSource, PromptsSection, RunConfig
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.policies import POLICIES
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.dummy_components import silent_t5
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.models.rewards.digits import DigitsReward
from flowmill.models.weights.lora_files import canonical_header
from flowmill.tasks.export.card import prompt_set
from flowmill.tasks.export.files import store_guider, store_scheduler, write_pipeline
from flowmill.tasks.inputs.base_model import front_matter, license_of
from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.runs.staleness import statuses
from flowmill.tasks.specs.graph import Node
from tests.conftest import ROOT, ConfigFactory
from tests.contracts.test_policies import TINY, plain_pipeline
from tests.support.families import PIPELINES
from tests.support.inside import evaluate, make_stage, prepare, run_epoch, run_stage, stage_run, stored_shards
from tests.support.language_models import texts_config, write_language_model

pytestmark = pytest.mark.slow

#: Follows the card's snippet in a process of its own: draws every sample of an evaluation with the snippet's own call.
FOLLOW = """
import json, sys, numpy as np
samples = json.load(open("samples.json"))
made = []
for sample in samples:
    start = torch.Generator().manual_seed(sample["seed"])
    result = pipe(prompt=sample["prompt"], generator=start, output_type="np", **call)
    made.append(np.asarray(result.frames[0] if hasattr(result, "frames") else result.images[0]))
np.save("made.npy", (np.stack(made) * 255).round())
assert "flowmill" not in sys.modules, "the snippet needs flowmill"
"""


def execute(context: RunContext, stage: str, epoch: int) -> None:
    run_stage(context, stage, epoch)


def trained(config: RunConfig) -> RunContext:
    """Return a run of one epoch, evaluated before and after, and exported."""
    context = prepare(config)
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    execute(context, "export", 1)
    return context


def untrained(config: RunConfig) -> Path:
    """Return the export of a run before its first epoch."""
    context = prepare(config)
    execute(context, "export", 0)
    return folder_of(context, 0)


def folder_of(context: RunContext, epoch: int = 1) -> Path:
    return exported_folder(context.store, context.chain.target(Node(epoch, "export")))


def evaluated(context: RunContext) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return prompts and seeds of held-out samples of an evaluation, and their media as float."""
    shard, *_ = stored_shards(context, 1, "evaluate")
    rows = shard.table.select(["prompt", "seed"]).to_pylist()
    return rows, np.stack([shard.media(number) for number in range(len(rows))]).astype(float)


def snippet_of(folder: Path) -> str:
    return (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]


def follow(folder: Path, place: Path, samples: list[dict[str, Any]], base: Path | None = None) -> np.ndarray:
    """Paste the card's snippet into a new process, and return what it draws for some samples."""
    shutil.copytree(folder, place)
    if base is not None:
        (place / json.loads((folder / "generation.json").read_text())["base_model"]).symlink_to(base)
    (place / "samples.json").write_text(json.dumps(samples))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", snippet_of(folder) + FOLLOW],
        cwd=place,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return np.load(place / "made.npy")


@pytest.mark.campaign
def test_the_snippet_of_a_whole_pipeline_gives_the_evaluation(make_config: ConfigFactory, tmp_path: Path) -> None:
    settings = ("evaluate.samples=8", "evaluate.steps=4", "optimize.learning_rate=3e-2", "model.vae_tiling=true")
    context = trained(make_config(*settings))
    folder = folder_of(context)
    assert "\npipe.vae.enable_tiling()\n" in snippet_of(folder)
    samples, ours = evaluated(context)
    made = follow(folder, tmp_path / "place", samples)
    assert np.abs(made - ours).max() <= 1
    prompts, nothing = [sample["prompt"] for sample in samples], [{}] * len(samples)
    scores = [DigitsReward().score(media, prompts, nothing).values.mean() for media in (made, ours)]
    assert abs(scores[0] - scores[1]) <= 0.02
    assert json.loads((folder / "generation.json").read_text())["call"] == {
        "height": 16,
        "width": 32,
        "guidance_scale": 1.0,
        "max_sequence_length": 1,
        "sigmas": [1.0, 0.75, 0.5, 0.25],
    }
    # The first image is the one the snippet saves.
    with diffusers.utils.load_image(str(tmp_path / "place" / "result.png")) as saved:
        assert np.abs(np.asarray(saved) - ours[0]).max() <= 1
    # And what the card warns of: diffusers' own settings draw something else.
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    start = torch.Generator().manual_seed(samples[0]["seed"])
    default = pipe(prompts[0], height=16, width=32, generator=start, output_type="np").images[0] * 255
    assert np.abs(default - ours[0]).mean() > 5


@pytest.mark.campaign
@pytest.mark.parametrize(("family", "frames"), [("flux1", 1), ("wan21", 1), ("wan21", 5)])
def test_the_snippet_of_lora_files_gives_the_evaluation(family: str, frames: int, tmp_path: Path) -> None:
    quiet_libraries()
    overrides = [f"store.root={tmp_path / 'store'}", "run.name=tiny", "run.epochs=1", "optimize.learning_rate=1e-2"]
    overrides.append(f"model.frames={frames}")
    context = trained(load_config(ROOT / "configs" / f"tiny_{family}.yaml", overrides))
    samples, ours = evaluated(context)
    made = follow(folder_of(context), tmp_path / "place", samples, context.base_folder)
    assert made.shape == ours.shape
    assert np.abs(made - ours).max() <= 1


@pytest.mark.campaign_cases("hunyuan_video15")
@pytest.mark.parametrize("family", PIPELINES)
def test_every_family_loads_from_its_exported_folder_alone(family: str, tmp_path: Path) -> None:
    quiet_libraries()
    build_tiny(family).save_pretrained(tmp_path / "base")
    tiny, cls = TINY[family], resolve(POLICIES, family, label="policy")
    settings = DiffusionSettings(height=tiny.size, width=tiny.size, frames=tiny.frames)
    policy = cls.load(tmp_path / "base", settings, frozenset({Part.DENOISER, Part.VAE}), tiny.options)
    with torch.no_grad():
        for module in policy.denoisers.values():
            next(module.parameters()).fill_(0.5)
    write_pipeline(policy, tmp_path / "base", tmp_path / "export")
    scheduler = policy.pipeline_call(4, None).scheduler
    if scheduler is not None:
        store_scheduler(scheduler, tmp_path / "export")
    assert policy.missing_parts(tmp_path / "export") == ()
    # The processors of Qwen's models need torchvision, of transformers itself; without it, they are given.
    pipe = plain_pipeline(cls, tmp_path / "export")
    for name in policy.denoisers:
        assert (next(getattr(pipe, name).parameters()) == 0.5).all()
    other = {**dict.fromkeys(("sd15", "sdxl"), "DDIMScheduler"), "cogvideox": "CogVideoXDDIMScheduler"}
    wanted = other.get(family, "FlowMatchEulerDiscreteScheduler")
    assert type(pipe.scheduler).__name__ == wanted
    shifts = {"sana": 3.0, "sana_video": 8.0, **{name: 3.0 for name in PIPELINES if name.startswith("wan")}}
    if family in shifts:
        assert pipe.scheduler.config.shift == shifts[family]
    # The export is a base model again.
    again = cls.load(tmp_path / "export", settings, frozenset({Part.DENOISER, Part.VAE}), tiny.options)
    assert torch.equal(again.sigmas(4), policy.sigmas(4))


def test_a_modular_export_is_a_repository_wherever_it_lies(tmp_path: Path) -> None:
    quiet_libraries()
    build_tiny("flux3").save_pretrained(tmp_path / "base")
    cls, settings = (
        resolve(POLICIES, "flux3", label="policy"),
        DiffusionSettings(height=64, width=64, guidance_scale=2.5),
    )
    policy = cls.load(tmp_path / "base", settings, frozenset({Part.DENOISER, Part.VAE}), {})
    call = policy.pipeline_call(4, "blurred")
    with torch.no_grad():
        next(policy.pipeline.transformer.parameters()).fill_(0.5)
    write_pipeline(policy, tmp_path / "base", tmp_path / "export")
    store_guider(call.guider, tmp_path / "export")
    (tmp_path / "base").rename(tmp_path / "gone")
    (tmp_path / "export").rename(tmp_path / "moved")
    pipe = ModularPipeline.from_pretrained(str(tmp_path / "moved"))
    # Its processor needs torchvision, of transformers itself; the block that writes prompts has no model here.
    pipe.load_components()
    assert type(pipe).__name__ == "Flux3ModularPipeline"
    assert pipe.guider.guidance_scale == 2.5
    assert (next(pipe.transformer.parameters()) == 0.5).all()
    assert set(pipe.null_component_names) <= {"prompt_upsampler", "prompt_upsampler_processor", "tokenizer"}
    assert all(str(tmp_path) not in path.read_text() for path in (tmp_path / "moved").rglob("*.json"))
    again = cls.load(tmp_path / "moved", settings, frozenset({Part.DENOISER, Part.VAE}), {})
    assert torch.equal(again.sigmas(4), policy.sigmas(4))


def test_a_model_without_t5_is_given_one_that_says_nothing(tmp_path: Path) -> None:
    whole = build_tiny("sd3")
    parts = {**whole.components, "text_encoder_3": None, "tokenizer_3": None}
    diffusers.StableDiffusion3Pipeline(**parts).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="expected"):
        DiffusionPipeline.from_pretrained(tmp_path / "base")
    cls = resolve(POLICIES, "sd3", label="policy")
    policy = cls.load(
        tmp_path / "base", DiffusionSettings(height=64, width=64), frozenset({Part.DENOISER, Part.VAE}), {}
    )
    assert policy.missing_parts(tmp_path / "base") == ("text_encoder_3", "tokenizer_3")
    write_pipeline(policy, tmp_path / "base", tmp_path / "export")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "export")
    reported = DiffusionPipeline.from_pretrained(tmp_path / "base", text_encoder_3=None, tokenizer_3=None)
    for length in (1, 7):
        ours, theirs = (
            one.encode_prompt(
                ["a cat", "ä\n"], None, None, do_classifier_free_guidance=False, max_sequence_length=length
            )
            for one in (pipe, reported)
        )
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[2], theirs[2])


def test_components_that_were_removed_from_a_folder_are_not_asked_for(tmp_path: Path) -> None:
    build_tiny("sd15").save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model_index.json"
    listed = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"], "requires_safety_checker": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **listed}))
    text_config = tmp_path / "base" / "text_encoder" / "config.json"
    noted = {"_name_or_path": str(tmp_path / "base"), "other": "owner/name"}
    text_config.write_text(json.dumps({**json.loads(text_config.read_text()), **noted}))
    settings, parts = DiffusionSettings(height=64, width=64), frozenset({Part.DENOISER, Part.VAE})
    policy = resolve(POLICIES, "sd15", label="policy").load(tmp_path / "base", settings, parts, {"steps": 4})
    write_pipeline(policy, tmp_path / "base", tmp_path / "export")
    assert DiffusionPipeline.from_pretrained(tmp_path / "export").safety_checker is None
    kept = json.loads((tmp_path / "export" / "text_encoder" / "config.json").read_text())
    assert "_name_or_path" not in kept
    assert kept["other"] == "owner/name"


def test_the_silent_t5_gives_zeros_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    encoder, tokenizer = silent_t5(8)
    assert torch.equal(before, torch.get_rng_state())
    tokens = tokenizer(["two\nlines", ""], padding="max_length", max_length=3, return_tensors="pt").input_ids
    assert tokens.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert torch.equal(encoder(tokens)[0], torch.zeros(2, 3, 8))


GUIDED = {"guidance_scale": 3.0, "negative_prompt": "blurred"}
TRUE_GUIDANCE = {"true_cfg_scale": 3.0, "negative_prompt": "blurred"}
#: What calls have in addition to size and number of steps.
CALLS: Mapping[str, dict[str, Any]] = {
    "sana_video": {
        **GUIDED,
        "max_sequence_length": 16,
        "frames": 5,
        "use_resolution_binning": False,
        "complex_human_instruction": None,
    },
    "sd15": GUIDED,
    "sdxl": GUIDED,
    "sd3": {**GUIDED, "max_sequence_length": 16},
    "flux2_klein": {"guidance_scale": 3.0, "max_sequence_length": 64},
    "flux3": {"negative_prompt": "blurred", "max_sequence_length": 160},
    "qwen_image": {**TRUE_GUIDANCE, "max_sequence_length": 64},
    "qwen_image21": {**TRUE_GUIDANCE, "use_kv_cache": False},
    "qwen_image_edit": TRUE_GUIDANCE,
    "qwen_image_edit_plus": TRUE_GUIDANCE,
    "wan22": {**GUIDED, "max_sequence_length": 16, "num_frames": 5, "guidance_scale_2": 2.0},
    "z_image": {"guidance_scale": 2.0, "negative_prompt": "blurred", "max_sequence_length": 64},
}


@pytest.mark.parametrize("family", sorted(CALLS))
def test_how_each_family_is_called(family: str, tmp_path: Path) -> None:
    quiet_libraries()
    build_tiny(family).save_pretrained(tmp_path)
    tiny = TINY[family]
    settings = DiffusionSettings(height=tiny.size, width=tiny.size, frames=tiny.frames, guidance_scale=3.0)
    options = {**tiny.options, **({"guidance_scale_2": 2.0} if family == "wan22" else {})}
    cls = resolve(POLICIES, family, label="policy")
    policy = cls.load(tmp_path, settings, frozenset({Part.DENOISER, Part.VAE}), options)
    call = policy.pipeline_call(4, "blurred")
    sizes = {"height": tiny.size, "width": tiny.size, "num_inference_steps": 4}
    assert call.arguments == {**sizes, **CALLS[family]}
    differences = {
        "flux2_klein": "always uses an empty one",
        "qwen_image21": "a channel of transparency",
        "qwen_image_edit": "always scales it to 1048576",
        "qwen_image_edit_plus": "always scales them to 1048576",
    }
    assert differences.get(family, "") in " ".join(call.differences)
    assert bool(call.differences) == (family in differences)


SAVE = """
import sys
from pathlib import Path
import torch
from flowmill.models.policies.diffusion import TrainableDenoiser
from flowmill.models.weights.lora import LoraSpec
from flowmill.models.policies.parts import Part
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.sd3 import SD3
settings, parts = DiffusionSettings(height=64, width=64), frozenset({Part.DENOISER, Part.VAE})
policy = SD3.load(Path(sys.argv[1]), settings, parts, {})
TrainableDenoiser(policy, LoraSpec(rank=2, alpha=8, targets=policy.lora_targets), seed=1)
for number in range(6):
    policy.save_lora(Path(sys.argv[2]) / str(number))
"""


@pytest.mark.campaign
def test_lora_files_of_two_processes_are_equal_byte_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny("sd3").save_pretrained(tmp_path / "base")
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    variables = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SAVE, str(tmp_path / "base"), str(tmp_path / "1")]
    subprocess.run(command, env=variables, check=True, capture_output=True, timeout=300)
    monkeypatch.setattr(sys, "argv", ["save", str(tmp_path / "base"), str(tmp_path / "2")])
    exec(SAVE, {})
    files = sorted(tmp_path.glob("[12]/*/pytorch_lora_weights.safetensors"))
    assert len(files) == 12
    assert len({path.read_bytes() for path in files}) == 1
    with safe_open(files[0], "pt") as opened:
        assert json.loads(opened.metadata()["lora_adapter_metadata"])["transformer.r"] == 2


def test_a_header_is_sorted_and_tensors_stay(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3.0), "a": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"z": "1", "a": "ü", "m": "{}"})
    canonical_header(tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert data[8:].startswith('{"__metadata__":{"a":"ü","m":"{}","z":"1"},"a":{"data_offsets":'.encode())
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    (tmp_path / "x.safetensors").write_bytes(data[:5])
    with pytest.raises(CorruptError, match="header is cut off"):
        canonical_header(tmp_path / "x.safetensors")


def test_the_card_tells_what_the_run_knows(make_config: ConfigFactory, tiny_base: Path, tmp_path: Path) -> None:
    named = shutil.copytree(tiny_base, tmp_path / "my-digits")
    (named / "README.md").write_text("---\nlicense: mit\nbase_model: x\n---\n# My digits\n")
    (named / "LICENSE").write_text("Do as you like.")
    (named / "old.safetensors").write_bytes(b"a checkpoint in one file")
    judges = "evaluate.judges=[{name: jpeg_compressibility, label: second, weight: 0.5}]"
    context = trained(make_config(f"model.path={named}", judges, "optimize.ema={decay: 0.5}"))
    folder = folder_of(context)
    head, text = front_matter(folder / "README.md"), (folder / "README.md").read_text()
    policy = context.chain.require(1, "optimize").ref
    assert head["license"] == "mit"
    assert (head["library_name"], head["pipeline_tag"]) == ("diffusers", "text-to-image")
    # The Hub would take a folder's name for the repository of a stranger.
    assert "base_model" not in head
    about = head["flowmill"]
    assert about["base_model"] == {"source": "folder", "name": "my-digits", "revision": None, "license": "mit"}
    assert about["prompts"] == {"train": "train.txt", "heldout": "heldout.txt"}
    assert about["prompts_artifact"] == str(context.chain.require(0, "preprocess").ref)
    assert about["rewards"] == [{"name": "jpeg_compressibility", "weight": 1.0}]
    assert (about["policy"], about["digest"]) == (str(policy), context.store.require(policy).digest)
    for key, epoch in (("before", 0), ("after", 1)):
        assert about[key] == evaluation_figures(context.chain, epoch)
    mean = about["after"]["heldout"]["second"]["mean"]
    assert (
        f"| held-out | `second`, a judge, mean | {about['before']['heldout']['second']['mean']:.4g} | {mean:.4g} |"
        in text
    )
    assert "moving average" in text
    assert (folder / "LICENSE").read_text() == "Do as you like."
    assert not (folder / "old.safetensors").exists()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert str(tmp_path).encode() not in path.read_bytes(), path
    # Who reads a store that was moved has no base model, and the export is the run's all the same.
    named.rename(tmp_path / "gone")
    moved = open_run(context.store.root.uri, "small", reads=True)
    assert moved.chain.require(1, "export").ref == make_stage(context, "export", 1).ref


@pytest.mark.parametrize("looked_at", [False, True])
def test_equal_inputs_give_equal_files_and_an_evaluation_is_an_input(
    make_config: ConfigFactory, looked_at: bool
) -> None:
    context = prepare(make_config("model.lora={rank: 2, alpha: 8}"))
    run_epoch(context, 1)
    execute(context, "export", 1)
    text = (folder_of(context) / "README.md").read_text()
    assert "The policy after epoch 1 was not evaluated." in text
    assert not list((folder_of(context) / "images").iterdir())
    first = context.chain.require(1, "export").ref
    if looked_at:
        statuses(context.chain)
    evaluate(context, 1)
    assert context.chain.find(1, "export") is None
    execute(context, "export", 1)
    second = context.chain.require(1, "export").ref
    assert second != first
    assert (folder_of(context) / "images" / "before-after.png").exists()
    assert "| not evaluated |" in (folder_of(context) / "README.md").read_text()
    digest = context.store.require(second).digest
    again = stage_run(context, "export", 1, force=True)
    again.execute()
    assert again.ref != second
    assert context.store.require(again.ref).digest == digest


def test_where_plain_diffusers_differs_is_said(make_config: ConfigFactory) -> None:
    lora = ["model.lora={rank: 2, alpha: 8}", "model.dtype=bfloat16", "evaluate.solver=dpm2", "evaluate.steps=5"]
    text = (untrained(make_config(*lora)) / "README.md").read_text()
    assert "dtype=torch.bfloat16" in text
    assert "The evaluation used the solver `dpm2`; this call takes Euler steps." in text
    assert "It decodes in bfloat16" in text
    # The run's own steps are three; the figures are of the evaluation's five.
    assert "sigmas=[1.0, 0.8, 0.6, 0.3999999999999999, 0.2]" in text


@pytest.mark.parametrize(
    ("card", "file", "found"),
    [
        ("---\nlicense: openrail++\n---\n", None, ("openrail++", None, None)),
        (
            "---\nlicense: other\nlicense_name: flux-dev\nlicense_link: LICENSE.md\n---\n# X\n",
            "LICENSE.md",
            ("other", "flux-dev", "LICENSE.md"),
        ),
        ("# no head\n", "LICENSE", ("other", "see-license-file", "LICENSE")),
        ("---\n: {[\n---\n", None, ("unknown", None, None)),
        (None, None, ("unknown", None, None)),
    ],
)
def test_licenses_are_those_the_base_states(
    card: str | None, file: str | None, found: tuple[str | None, ...], tmp_path: Path
) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    if file is not None:
        (tmp_path / file).write_text("text")
    stated = license_of(tmp_path)
    assert (stated.id, stated.name, stated.link) == found


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def snapshot_of(model: Path, name: str, folder: Path) -> Path:
    """Return a model as the Hub's cache stores the repository ``owner/name``."""
    snapshot = folder / "hub" / f"models--owner--{name}" / "snapshots" / COMMIT
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir(parents=True)

    def link(source: str, target: str) -> None:
        blob = shutil.copy(source, blobs / Path(target).relative_to(snapshot).as_posix().replace("/", "-"))
        Path(target).symlink_to(blob)

    shutil.copytree(model, snapshot, copy_function=link)
    return snapshot


def test_a_snapshot_of_the_hub_is_named_by_its_repository(
    make_config: ConfigFactory, tiny_base: Path, tmp_path: Path
) -> None:
    snapshot = snapshot_of(tiny_base, "digits", tmp_path)
    folder = untrained(make_config(f"model.path={snapshot}", "model.lora={rank: 2, alpha: 8}"))
    head, text = front_matter(folder / "README.md"), snippet_of(folder)
    assert (head["base_model"], head["base_model_relation"]) == ("owner/digits", "adapter")
    assert 'base = "owner/digits"\n' in text
    assert f'from_pretrained(base, revision="{COMMIT}", dtype=torch.float32)' in text
    assert 'pipe.load_lora_weights(folder, weight_name="pytorch_lora_weights.safetensors")' in text


def test_an_adapter_of_a_snapshots_language_model_names_its_repository_and_commit(tmp_path: Path) -> None:
    write_language_model(tmp_path / "sums")
    snapshot = snapshot_of(tmp_path / "sums", "sums", tmp_path)
    folder = untrained(texts_config(tmp_path, f"model.path={snapshot}", "model.lora={rank: 2, alpha: 8}"))
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("owner/sums", COMMIT)
    assert f'.from_pretrained("owner/sums", revision="{COMMIT}")' in (folder / "README.md").read_text()


def test_prompt_sets_are_named_without_folders() -> None:
    for source, name in (
        ("/home/me/prompts/signs.txt", "signs.txt"),
        ("C:\\prompts\\signs.jsonl", "signs.jsonl"),
        ("owner/prompts", "owner/prompts"),
    ):
        assert prompt_set(PromptsSection(train=source), "train") == name
    assert prompt_set(PromptsSection(train="a.txt"), "heldout") is None
    several = PromptsSection(sources=tuple(PromptSource(name=each, train=f"/x/{each}.txt") for each in ("a", "b")))
    assert prompt_set(several, "train") == "a.txt, b.txt"


def test_the_head_is_yaml_whatever_it_names(make_config: ConfigFactory, tiny_base: Path, tmp_path: Path) -> None:
    odd = tmp_path / "prompts: [1] #x.txt"
    odd.write_text('"01"\n"02"\n"03"\n"04"\n')
    folder = untrained(make_config(f"prompts.train={json.dumps(str(odd))}", "rewards=[{name: digits, label: 'a: b'}]"))
    head = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert head["flowmill"]["prompts"]["train"] == odd.name
    assert head["flowmill"]["rewards"] == [{"name": "digits", "label": "a: b", "weight": 1.0}]
