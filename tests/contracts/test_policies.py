"""The contract of every model family; parametrized over the table, on tiny real pipelines."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, ModularPipeline, PNDMScheduler
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image
from safetensors.torch import load_file

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.model_families import FAMILIES, families, most_images, spec_of
from flowmill.configs.registry import resolve
from flowmill.models.image_files import within
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.preserving import clean_ends, flow_length
from flowmill.models.maths.sampling import Sampler, grid_at, ode_plan, replay, sample
from flowmill.models.maths.schedules import AllSteps
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE, FlowSDE
from flowmill.models.policies import POLICIES
from flowmill.models.policies.attention import BACKENDS, FIXED, MASKED
from flowmill.models.policies.ddim import DDIMPolicy
from flowmill.models.policies.diffusion import DiffusionPolicy, DiffusionSettings, PipelineCall, TrainableDenoiser
from flowmill.models.policies.ltx2 import LTX2
from flowmill.models.policies.modular import ModularPolicy
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline_index import MODULAR, component_entry, index_file
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.models.weights.lora import LoraSpec, check_lora_targets
from flowmill.models.weights.lora_files import LORA_FILE
from flowmill.models.weights.merging import Merged
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.export.files import store_guider, write_pipeline
from tests.support.families import PIPELINES, SLOW_PAIRS, UNPADDED, family_params, representatives

ALL = frozenset(Part)
FLUX2 = ("flux2", "flux2_klein")
#: Families that edit where their option ``references`` is set, with further options and arguments of the pipeline.
EDITORS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **dict.fromkeys((*FLUX2, "flux3"), ({}, {})),
    "qwen_image21": ({"max_sequence_length": 128, "reference_area": 64 * 64}, {"output_resolution": 64}),
}
#: Of what no family but a base class has written, tests on one family for each are enough for every change.
BASE_CLASSES = pytest.mark.parametrize("family", family_params(representatives(of_families=False)))
PROMPTS = ["a red cube", "two cats and a dog in the photo", 'a sign "9"', "a blue circle on a green cube"]


class Decoded(tuple[torch.Tensor]):
    """What an autoencoder returns."""

    @property
    def sample(self) -> torch.Tensor:
        return self[0]


@dataclass(frozen=True)
class Tiny:
    """How the tiny pipeline of a family is called."""

    size: int = 64
    """Height and width."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of our adapter."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline."""
    guidance: str = "guidance_scale"
    """Name of the pipeline's argument for guidance; empty if it has a guider."""
    guidance_offset: float = 0.0
    """The pipeline's guidance minus ours."""
    negative: str = ""
    """A negative prompt both take."""
    tolerance: float = 0.0
    """Largest difference of latents on the ODE."""
    pixels: int = 0
    """Largest difference of decoded values where latents are equal."""
    frames: int = 1
    """Frames of a clip."""


def of_length(length: int, **further: Any) -> dict[str, Any]:
    """Return what the adapter and the pipeline are reported about text length."""
    options = {"max_sequence_length": length}
    return {"options": options, "call": {**options, **further}}


_LTX2 = Tiny(
    **of_length(
        16,
        num_frames=9,
        stg_scale=0.0,
        audio_stg_scale=0.0,
        spatio_temporal_guidance_blocks=None,
        modality_scale=1.0,
        audio_modality_scale=1.0,
        guidance_rescale=0.0,
        audio_guidance_rescale=0.0,
        audio_guidance_scale=0.0,
    ),
    tolerance=1e-5,
    frames=9,
)
TINY: Mapping[str, Tiny] = {
    # Float rounding between two coordinate systems of the same step, of latents of size 20.
    "sd15": Tiny(options={"steps": 4}, tolerance=2e-5),
    "sdxl": Tiny(options={"steps": 4}, tolerance=2e-5),
    "sd3": Tiny(**of_length(16)),
    "flux1": Tiny(**of_length(16)),
    "flux1_kontext": Tiny(**of_length(16, max_area=64 * 64, _auto_resize=False)),
    "flux2": Tiny(**of_length(192)),
    "flux2_klein": Tiny(**of_length(64)),
    "flux3": Tiny(**of_length(160), guidance="", pixels=1),
    # Text is padded to a fixed length here, and to the longest prompt there.
    "qwen_image": Tiny(**of_length(64), guidance="true_cfg_scale", negative=" ", tolerance=2e-6),
    "qwen_image_edit": Tiny(
        options={"max_sequence_length": 128, "condition_area": 64 * 64},
        guidance="true_cfg_scale",
        negative=" ",
        tolerance=2e-6,
    ),
    "qwen_image_edit_plus": Tiny(
        options={"max_sequence_length": 192, "references": 3, "reference_area": 64 * 64},
        guidance="true_cfg_scale",
        negative=" ",
        tolerance=2e-6,
    ),
    # Its text's keys and values are computed again at every step, as they are here.
    "qwen_image21": Tiny(
        options={"max_sequence_length": 64},
        call={"use_kv_cache": False},
        guidance="true_cfg_scale",
        negative=" ",
        # Four images are decoded at once here, one there.
        pixels=1,
    ),
    "wan21": Tiny(32, **of_length(16, num_frames=5), frames=5),
    "wan22": Tiny(32, **of_length(16, num_frames=5), frames=5),
    "wan22_ti2v": Tiny(64, **of_length(16, num_frames=5), frames=5),
    "wan22_ti2v_i2v": Tiny(64, **of_length(16, num_frames=5), frames=5),
    "wan21_v2v": Tiny(
        32, options={"max_sequence_length": 16, "strength": 0.8}, call={"max_sequence_length": 16}, frames=5
    ),
    "wan21_i2v": Tiny(32, **of_length(16, num_frames=5), frames=5),
    "wan22_i2v": Tiny(32, **of_length(16, num_frames=5), frames=5),
    # The pipeline's own instruction has a test of its own. Linear layers of the autoencoder round by where memory is.
    "sana": Tiny(
        options={"max_sequence_length": 16, "instruction": False},
        call={"max_sequence_length": 16, "complex_human_instruction": None, "use_resolution_binning": False},
        pixels=1,
    ),
    "sana_video": Tiny(
        options={"max_sequence_length": 16, "instruction": False},
        call={
            "max_sequence_length": 16,
            "complex_human_instruction": None,
            "use_resolution_binning": False,
            "frames": 5,
        },
        frames=5,
    ),
    "hunyuan_video15": Tiny(32, options={"max_sequence_length": 24}, call={"num_frames": 5}, guidance="", frames=5),
    "hunyuan_video15_i2v": Tiny(32, options={"max_sequence_length": 24}, call={"num_frames": 5}, guidance="", frames=5),
    # As of the others of DDIM, float rounding between two coordinate systems; it has positions for so much text.
    "cogvideox": Tiny(32, **of_length(226, num_frames=9), tolerance=1e-5, frames=9),
    # Guidance by two predictions alone, whose sum the pipeline takes of clean latents and the adapter of velocities.
    "ltx2": _LTX2,
    # As in 2.3, which is the pipeline's default.
    "ltx2_i2v": dataclasses.replace(_LTX2, options={**_LTX2.options, "use_cross_timestep": True}),
    # The pipeline runs both halves of guidance in one forward of other padding.
    "z_image": Tiny(**of_length(64), guidance_offset=-1.0, tolerance=2e-6),
}


#: Families whose models are called once, regardless of the guidance.
ONCE = families(lambda spec: spec.guidance == "input")
#: Families whose pipelines take one image, and one prompt with it.
SINGLE = {"ltx2_i2v"}
#: Families of two denoisers.
TWO = {"wan22", "wan22_i2v"}


def test_every_family_of_pipelines_has_a_tiny_one() -> None:
    assert set(TINY) == set(PIPELINES)


def test_texts_are_no_longer_than_the_pipeline_of_an_export_reads() -> None:
    limits = {}
    for family in PIPELINES:
        cls = resolve(POLICIES, family, label="policy")
        checks = "" if issubclass(cls, ModularPolicy) else inspect.getsource(getattr(diffusers, cls.pipeline_name))
        found = re.search(r"max_sequence_length > (\d+)", checks)
        if found is not None and "max_sequence_length" not in cls.missing_arguments:
            limits[family] = int(found[1])
    assert limits == {"flux1": 512, "flux1_kontext": 512, "qwen_image": 1024, "sd3": 512}
    assert limits == {family: spec.text_limit for family, spec in FAMILIES.items() if spec.text_limit is not None}
    for family, most in limits.items():
        settings = [f"model.options.max_sequence_length={most + 1}", "model.attention=null"]
        with pytest.raises(ConfigError, match=f"takes {most} at most"):
            check_config(load_config(f"tiny_{family}", settings), rewards=False)


def test_classes_that_families_share_are_those_of_a_representative() -> None:
    lines = {name: set(resolve(POLICIES, name, label="policy").__mro__) for name in PIPELINES}
    shared = set[type]().union(*(lines[one] & lines[other] for one, other in itertools.combinations(PIPELINES, 2)))
    shared -= {resolve(POLICIES, name, label="policy") for name in SLOW_PAIRS}
    assert shared <= set[type]().union(*(lines[name] for name in representatives()))
    bases = shared - {resolve(POLICIES, name, label="policy") for name in PIPELINES}
    assert bases <= set[type]().union(*(lines[name] for name in representatives(of_families=False)))


_PLUS = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"


_HUNYUAN = ("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline")


def _smaller(cls: Any) -> Any:
    """Return an ``__init__`` of a HunyuanVideo pipeline that reads little text."""
    made = cls.__init__

    def smaller(self: Any, **parts: Any) -> None:
        made(self, **parts)
        # As much text as our own pipeline reads, and fewer tokens of things that are not there.
        self.tokenizer_max_length, self.tokenizer_2_max_length, self.vision_num_semantic_tokens = 24, 16, 3

    smaller.__signature__ = inspect.signature(made)  # type: ignore[attr-defined]
    return smaller


@cache
def small_settings() -> tuple[tuple[str, Any], ...]:
    """Return what pipelines have as constants, by import string, as small as tiny models are."""
    return (
        *((f"diffusers.{name}.__init__", _smaller(getattr(diffusers, name))) for name in _HUNYUAN),
        (f"{_PLUS}.VAE_IMAGE_SIZE", 64 * 64),
        (f"{_PLUS}.CONDITION_IMAGE_SIZE", 64 * 64),
        # The image to edit is scaled to a megapixel by the pipeline; here both take it as small as it is.
        (
            "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit.calculate_dimensions",
            lambda area, ratio: (64, 64, None),
        ),
    )


@pytest.fixture(autouse=True)
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pipeline that scales images, to a megapixel and for its text encoder, make them small."""
    for setting in small_settings():
        monkeypatch.setattr(*setting)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(params=family_params(representatives()))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(family: str, tiny_folders: Path) -> Path:
    path = tiny_folders / family
    if not path.exists():
        build_tiny(family).save_pretrained(path)
    return path


Load = Callable[..., DiffusionPolicy]


@pytest.fixture(scope="session")
def loaded() -> dict[str, DiffusionPolicy]:
    """Policies loaded before, in their original state."""
    return {}


@pytest.fixture
def load(family: str, folder: Path, loaded: dict[str, DiffusionPolicy]) -> Load:
    """Loads a policy, or copies the one that was loaded with the same settings before, where it is plain modules."""

    def make(
        guidance_scale: float = 1.0, parts: frozenset[Part] = ALL, folder: Path = folder, **settings: Any
    ) -> DiffusionPolicy:
        tiny = TINY[family]
        options = {**tiny.options, **settings.pop("options", {})}
        size = {"height": tiny.size, "width": tiny.size, "frames": tiny.frames, **settings}
        chosen = DiffusionSettings(guidance_scale=guidance_scale, **size)
        cls = resolve(POLICIES, family, label="policy")
        if {"compile", "empty"} & set(settings):
            return cls.load(folder, chosen, parts, options)
        name = repr((folder, chosen, sorted(part.name for part in parts), sorted(options.items())))
        if name not in loaded:
            loaded[name] = copyable(cls.load(folder, chosen, parts, options))
        return copy.deepcopy(loaded[name])

    return make


def copyable(policy: DiffusionPolicy) -> DiffusionPolicy:
    """Let go of the weights that weight norms made when layers were made; forwards make them again."""
    for module in policy.modules().values():
        for layer in module.modules():
            if "weight_g" in layer._parameters:
                layer.weight = layer.weight.detach()
    return policy


def pictures(family: str, count: int) -> list[list[np.ndarray]] | None:
    """Return images to start from; the video pipelines take one for all prompts, and scale it."""
    if spec_of(family).references is not None and most_images(family, TINY[family].options):
        return [references(row) for row in range(count)]
    if spec_of(family).starts_from == "text":
        return None
    if family == "wan21_v2v":
        return [[np.random.default_rng(0).integers(0, 256, (7, 48, 80, 3), dtype=np.uint8)] for _ in range(count)]
    clips = TINY[family].frames > 1
    seeds, size = ([0] * count, (48, 80, 3)) if clips else (range(count), (64, 64, 3))
    return [[np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)] for seed in seeds]


def references(row: int) -> list[np.ndarray]:
    """Return one, two or three images of shapes of their own, larger and smaller than what is generated."""
    draw, sizes = np.random.default_rng(row), [(64, 96), (80, 64), (144, 112), (65, 70)]
    return [draw.integers(0, 256, (*sizes[(row + n) % 4], 3), dtype=np.uint8) for n in range(1 + row % 3)]


def row_by_row(policy: DiffusionPolicy) -> bool:
    return policy.family in UNPADDED or "image_grid_1" in encode(policy, PROMPTS)


def encode(policy: DiffusionPolicy, prompts: list[str]) -> dict[str, torch.Tensor]:
    return policy.encode(prompts, pictures(policy.family, len(prompts)))


def conditioning(policy: DiffusionPolicy, guided: bool, prompts: list[str] = PROMPTS) -> Conditioning:
    guided = guided and policy.family not in ONCE
    negative = encode(policy, [TINY[policy.family].negative] * len(prompts)) if guided else None
    return Conditioning(encode(policy, prompts), negative)


def noise(policy: DiffusionPolicy, rows: int = 4) -> torch.Tensor:
    return policy.initial_latents([torch.Generator().manual_seed(row) for row in range(rows)])


def one_by_one(
    pipeline: Any, images: list[list[np.ndarray]] | None, generators: list[torch.Generator], **call: Any
) -> Any:
    """Call a pipeline that takes all images it is given for those of every prompt, or pads texts to the longest."""
    single = {name: value[:1] if isinstance(value, list) else value for name, value in call.items()}
    rows = []
    for number, (prompt, generator) in enumerate(zip(PROMPTS, generators, strict=True)):
        given = {} if images is None else {"image": [Image.fromarray(picture) for picture in images[number]]}
        rows.append(drawn_alone(pipeline, prompt=[prompt], generator=[generator], **given, **single))
    return torch.cat(rows) if isinstance(rows[0], torch.Tensor) else np.concatenate(rows)


def drawn_alone(pipeline: Any, *, output_type: str, **call: Any) -> Any:
    """Return what a pipeline draws of one prompt; modular ones take a text where others take lists of texts."""
    if not isinstance(pipeline, ModularPipeline):
        made = pipeline(output_type=output_type, **call)
        return made.frames if "frames" in made else made.images
    single = {name: value[0] if isinstance(value, list) and name != "image" else value for name, value in call.items()}
    state = pipeline(output_type="np", **single)
    return state.latents.flatten(2).transpose(1, 2) if output_type == "latent" else state.images


def plain_pipeline(cls: Any, folder: Path) -> Any:
    """Return diffusers' own pipeline of a folder, loaded as it says, but for what needs packages that are not here."""
    given = cls.components(folder, ALL)
    if issubclass(cls, ModularPolicy):
        pipeline = filled(cls.pipeline_blocks().init_pipeline(str(folder)), given)
    else:
        pipeline = DiffusionPipeline.from_pretrained(folder, **given)
    # torch multiplies rows together where a weight takes gradients, one by one elsewhere, which rounds otherwise.
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    return pipeline


def filled(pipeline: Any, given: Mapping[str, Any]) -> Any:
    """Return a modular pipeline with its components: those given, and the others loaded."""
    pipeline.load_components([name for name in pipeline.pretrained_component_names if name not in given])
    pipeline.update_components(**given)
    return pipeline


def no_noise(step: int) -> torch.Tensor:
    raise AssertionError("the ODE needs no noise")


def ode(policy: DiffusionPolicy, steps: int, guided: bool) -> torch.Tensor:
    sampler = Sampler(kernel=ODE(), solver=Euler())
    cond, sigmas = conditioning(policy, guided), policy.sigmas(steps)
    start = policy.started(noise(policy), sigmas, cond)
    return sample(policy, cond, start, sigmas, sampler=sampler, plans=[ode_plan()] * 4, noise=no_noise).final


def seen(policy: DiffusionPolicy, final: torch.Tensor) -> torch.Tensor:
    """Return the latents that a pipeline gives of what is seen, of final ones."""
    return policy.clip_latents(final) if isinstance(policy, LTX2) else final


def set_scheduler(pipeline: Any, call: PipelineCall | None) -> None:
    """Give a pipeline the scheduler, and the guider, that a policy's call names."""
    if call is not None and call.guider is not None:
        pipeline.guider = diffusers.ClassifierFreeGuidance(**call.guider)
    choice = call and call.scheduler
    if choice is None:
        return
    made, own = getattr(diffusers, choice.name), pipeline.scheduler.config
    pipeline.scheduler = made.from_config(own, **choice.options) if choice.from_config else made(**choice.options)


def starting(policy: DiffusionPolicy, images: list[list[np.ndarray]] | None, steps: int) -> dict[str, Any]:
    """Return the arguments of a pipeline for the images or the clip that all prompts start from."""
    if images is None or spec_of(policy.family).references is not None:
        return {}
    if not policy.starts_from_clips:
        started = [Image.fromarray(picture) for (picture,) in images]
        return {"image": started[0] if TINY[policy.family].frames > 1 else started}
    reported = policy.pipeline_call(steps, None)
    assert reported is not None
    film = [Image.fromarray(frame) for frame in images[0][0][: reported.clip]]
    return {"video": film, **{key: reported.arguments[key] for key in ("num_inference_steps", "strength")}}


def second_guidance(family: str) -> dict[str, Any]:
    """Return the guidance of the second denoiser, for families of two."""
    return {"guidance_scale_2": 3.0} if family in TWO else {}


def pipeline_call(policy: DiffusionPolicy, folder: Path, steps: int) -> Callable[[str], Any]:
    """Return a call of diffusers' pipeline, where and as the policy is called: kind of output -> four images or clips.

    Pipelines that scale images they start from must have been set not to, see ``small_settings``.
    """
    family, guidance_scale = policy.family, policy.settings.guidance_scale
    tiny = TINY[family]
    pipeline = plain_pipeline(type(policy), folder).to(policy.settings.device)
    pipeline.set_progress_bar_config(disable=True)
    # UniPC, Wan's default, is multistep and rounds its timesteps; Euler's steps end lower than DDIM's.
    set_scheduler(pipeline, policy.pipeline_call(steps, None))
    if family.startswith("hunyuan_video15"):
        # Of several clips its autoencoder decodes none at once.
        pipeline.vae.enable_slicing()
    call = {"height": tiny.size, "width": tiny.size, "num_inference_steps": steps, **tiny.call}
    call |= second_guidance(family)
    call = {name: value for name, value in call.items() if name not in type(policy).missing_arguments}
    if tiny.guidance:
        call[tiny.guidance] = guidance_scale + tiny.guidance_offset
    if tiny.guidance not in ("", "guidance_scale"):
        call["negative_prompt"] = [tiny.negative] * 4
    images_to_start_from = pictures(family, 4)
    call |= starting(policy, images_to_start_from, steps)

    def run(output: str) -> Any:
        generators = [torch.Generator().manual_seed(row) for row in range(4)]
        if family in UNPADDED or (images_to_start_from is not None and spec_of(family).references is not None):
            images = images_to_start_from if spec_of(family).references is not None else None
            made = one_by_one(pipeline, images, generators, output_type=output, **call)
            # Policies leave a fourth channel, transparency, away.
            return made[..., :3] if output == "np" else made
        if family in SINGLE:
            return one_by_one(pipeline, None, generators, output_type=output, **call)
        made = pipeline(prompt=list(PROMPTS), generator=generators, output_type=output, **call)
        return made.frames if tiny.frames > 1 else made.images

    return run


@pytest.mark.parametrize(
    ("family", "guidance_scale"),
    [
        pytest.param(*each.values, scale, marks=each.marks)
        for scale, quick in ((1.0, representatives()), (4.5, set(PIPELINES) - SLOW_PAIRS))
        for each in family_params(quick)
    ],
)
def test_ode_equals_the_pipeline(family: str, load: Load, folder: Path, guidance_scale: float) -> None:
    steps, tiny = 4, TINY[family]
    policy = load(guidance_scale, options=second_guidance(family))
    ours = policy.finished(ode(policy, steps, guidance_scale > 1), conditioning(policy, False))
    run = pipeline_call(policy, folder, steps)
    images = (np.asarray(run("np")) * 255).round().astype(np.uint8)
    ours_decoded = policy.decode(ours).numpy()
    if family == "flux2_klein":
        # Its pipeline gives unpacked latents; equal pictures of equal decoders say the same.
        np.testing.assert_array_equal(ours_decoded, images)
        return
    if isinstance(policy, DDIMPolicy):
        ours = ours / flow_length(policy.sigmas(steps)[-1:])
    ours = seen(policy, ours)
    theirs = run("latent")
    if tiny.tolerance == 0:
        assert torch.equal(ours, theirs)
        assert np.abs(ours_decoded.astype(int) - images).max() <= tiny.pixels
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tiny.tolerance)
        assert np.abs(ours_decoded.astype(int) - images).max() <= 1


@pytest.mark.parametrize("family", family_params(PIPELINES, ("qwen_image21",)))
def test_the_modular_pipeline_of_a_classic_folder_draws_the_same(load: Load, folder: Path) -> None:
    policy = load(4.5)
    pipeline = filled(ModularPipeline.from_pretrained(str(folder)), policy.components(folder, ALL))
    pipeline.guider = diffusers.ClassifierFreeGuidance(guidance_scale=4.5)
    generators = [torch.Generator().manual_seed(row) for row in range(4)]
    call = {"height": 64, "width": 64, "num_inference_steps": 4, "negative_prompt": [" "], "use_kv_cache": False}
    assert type(pipeline).__name__ == "QwenImage21ModularPipeline"
    assert torch.equal(one_by_one(pipeline, None, generators, output_type="latent", **call), ode(policy, 4, True))


@pytest.mark.parametrize(
    ("family", "guidance_scale"),
    [
        pytest.param(*each.values, scale, marks=each.marks)
        for scale, quick in ((1.0, ("flux2",)), (4.5, ("flux2", "flux3", "qwen_image21")))
        for each in family_params(quick, EDITORS)
    ],
)
def test_references_are_edited_one_two_and_three_as_by_the_pipeline(
    family: str, load: Load, folder: Path, guidance_scale: float
) -> None:
    options, arguments = EDITORS[family]
    policy, tiny = load(guidance_scale, options={**options, "references": 3}), TINY[family]
    negative, started = family not in ONCE and guidance_scale > 1, [references(row) for row in range(4)]
    cond = Conditioning(
        policy.encode(PROMPTS, started), policy.encode([tiny.negative] * len(PROMPTS), started) if negative else None
    )
    sampler, plans = Sampler(kernel=ODE(), solver=Euler()), [ode_plan()] * 4
    ours = sample(policy, cond, noise(policy), policy.sigmas(4), sampler=sampler, plans=plans, noise=no_noise).final
    pipeline = plain_pipeline(type(policy), folder)
    pipeline.set_progress_bar_config(disable=True)
    set_scheduler(pipeline, policy.pipeline_call(4, None))
    call = {"height": 64, "width": 64, "num_inference_steps": 4, **tiny.call, **arguments}
    call |= {tiny.guidance: guidance_scale} if tiny.guidance else {}
    call |= {"negative_prompt": [tiny.negative]} if tiny.guidance == "true_cfg_scale" else {}

    def run(output: str) -> Any:
        generators = [torch.Generator().manual_seed(row) for row in range(4)]
        return one_by_one(pipeline, started, generators, output_type=output, **call)

    if family == "flux2_klein":
        # Its pipeline gives unpacked latents; equal pictures of equal decoders say the same.
        decoded = torch.cat([policy.decode(row[None]) for row in ours])
        np.testing.assert_array_equal(decoded.numpy(), (run("np") * 255).round().astype(np.uint8))
    else:
        assert torch.equal(ours, run("latent"))
    # Without images it is another model's input altogether.
    assert not torch.equal(ours, ode(load(guidance_scale), 4, negative))


@pytest.mark.parametrize("family", family_params(representatives(), FLUX2))
@pytest.mark.parametrize("lora", [True, False])
def test_flux2_learns_to_edit(family: str, load: Load, lora: bool) -> None:
    policy = load(options={"references": 3})
    spec = LoraSpec(rank=2, alpha=4, targets=policy.lora_targets) if lora else None
    trainable = TrainableDenoiser(policy, spec, seed=0)
    cond, sigma = Conditioning(policy.encode(PROMPTS, [references(row) for row in range(4)])), torch.full((4,), 0.9)
    optimizer, losses = torch.optim.Adam(trainable.parameters(), lr=1e-2 if lora else 1e-3), []
    for _ in range(3):
        loss = (policy.velocity(noise(policy), sigma, cond) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("family", ["flux2", "qwen_image_edit_plus"])
def test_images_that_a_model_cannot_take_are_refused(family: str, load: Load) -> None:
    policy = load(options={"references": 2})
    narrow = np.zeros((64, 600, 3), np.uint8)
    for images, said in (
        ([], "comes with 0 images"),
        (references(2), "references is 2.* comes with 3 images"),
        ([narrow], "600 x 64 pixels"),
    ):
        with pytest.raises(ConfigError, match=said):
            policy.encode(["edit"], [images])
    if family == "flux2":
        with pytest.raises(ConfigError, match="32 x 64 pixels, but the model takes sides of 64 pixels and more"):
            policy.encode(["edit"], [[np.zeros((64, 32, 3), np.uint8)]])


def test_larger_images_are_scaled_down_to_the_area(tiny_folders: Path) -> None:
    path = tiny_folders / "flux2_klein"
    if not path.exists():
        build_tiny("flux2_klein").save_pretrained(path)
    cls = resolve(POLICIES, "flux2_klein", label="policy")
    large, options = references(2)[0], {"max_sequence_length": 64, "references": 1, "reference_area": 96 * 96}
    policy = cls.load(path, DiffusionSettings(height=64, width=64), ALL, options)
    scaled = np.array(within(Image.fromarray(large), 96 * 96))
    assert large.shape[0] * large.shape[1] > 96 * 96 >= scaled.shape[0] * scaled.shape[1]
    ours, theirs = (policy.encode(["edit"], [[image]]) for image in (large, scaled))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    call = policy.pipeline_call(4, None)
    assert call is not None
    assert (call.image_area, len(call.differences)) == (96 * 96, 1)
    np.testing.assert_array_equal(
        scaled, np.array(Flux2ImageProcessor._resize_to_target_area(Image.fromarray(large), 96 * 96))
    )


@pytest.mark.parametrize("family", family_params(PIPELINES, ("sana",)))
def test_prompts_are_instructed_and_negative_ones_are_not(load: Load) -> None:
    policy = load(4.5, options={"instruction": True})
    call = policy.pipeline_call(2, "")
    assert call is not None
    pipeline = copy.copy(policy.pipeline)
    set_scheduler(pipeline, call)
    # A long one loses its end, not the instruction.
    prompts = ["a red cube", "two cats and a dog in the photo of the sign that says 1 2 3 4 5 6 7 8 9"]
    generators = [torch.Generator().manual_seed(row) for row in range(2)]
    theirs = pipeline(prompt=prompts, generator=generators, output_type="latent", **call.arguments).images
    cond = Conditioning(policy.encode(prompts), policy.encode(["", ""]))
    sampler, plans = Sampler(kernel=ODE(), solver=Euler()), [ode_plan()] * 2
    start, sigmas = noise(policy, 2), policy.sigmas(2)
    assert torch.equal(sample(policy, cond, start, sigmas, sampler=sampler, plans=plans, noise=no_noise).final, theirs)
    plain = load(4.5).encode(prompts)
    assert not torch.equal(plain["prompt_embeds"], cond.positive["prompt_embeds"])


MOVING = pytest.mark.parametrize("family", family_params(PIPELINES, ("wan22_ti2v_i2v",)))


@MOVING
def test_log_probs_of_image_to_video_are_means_over_the_frames_that_move(load: Load) -> None:
    policy, step = load(), 1
    rollout, cond = rollout_of(policy), conditioning(policy, False)
    grid = grid_at(policy.sigmas(4), torch.full((4,), step))
    before, after = rollout.states[:, step], rollout.states[:, step + 1]
    velocity = policy.velocity(before, grid.sigma, cond)
    # The whole clip under the same kernel, of which the first frame is masked.
    whole, following = (policy.finished(part, cond) for part in (before, after))
    moves = torch.ones(1, 1, *whole.shape[2:])
    moves[:, :, 0] = 0
    drift = torch.cat([torch.randn_like(whole[:, :, :1]), velocity], dim=2)
    distribution = FlowSDE().step(whole, drift, grid)
    std = distribution.std.double().view(-1, 1, 1, 1, 1)
    terms = torch.distributions.Normal(distribution.mean.double(), std).log_prob(following.double()) * moves
    mean = terms.flatten(1).sum(1) / (moves.sum() * whole.shape[1])
    torch.testing.assert_close(rollout.log_probs[:, step].double(), mean, rtol=1e-5, atol=1e-5)
    assert moves.sum() * whole.shape[1] == before[0].numel()


@MOVING
def test_gradients_of_log_probs_of_image_to_video_are_finite_differences(load: Load) -> None:
    policy, step = load(), 1
    rollout, cond = rollout_of(policy), conditioning(policy, False)
    grid = grid_at(policy.sigmas(4), torch.full((4,), step))
    trainable = TrainableDenoiser(policy, None, seed=0)
    weight = max(trainable.parameters(), key=torch.numel)

    def log_prob() -> torch.Tensor:
        velocity = policy.velocity(rollout.states[:, step], grid.sigma, cond)
        # Against what another policy drew, so that the slope is not that of noise alone.
        return replay(FlowSDE(), rollout.states[:, step], velocity, rollout.states[:, step + 1] + 0.5, grid)[1].sum()

    (gradient,) = torch.autograd.grad(log_prob(), weight)
    slope, found = gradient.norm(), []
    direction = gradient / slope
    with torch.no_grad():
        for sign in (1, -1):
            weight.add_(direction, alpha=sign * 1e-2)
            found.append(log_prob())
            weight.sub_(direction, alpha=sign * 1e-2)
    torch.testing.assert_close((found[0] - found[1]) / 2e-2, slope, rtol=1e-2, atol=0)


@MOVING
def test_a_clip_of_the_image_alone_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"nothing is left to make\. Set it to 5 or more"):
        load(frames=1)


@MOVING
def test_the_published_folder_names_the_pipeline_of_text(load: Load, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "base")
    index = json.loads((tmp_path / "base" / "model_index.json").read_text())
    text = {key: value for key, value in index.items() if key not in ("image_encoder", "image_processor")}
    (tmp_path / "base" / "model_index.json").write_text(json.dumps({**text, "_class_name": "WanPipeline"}))
    assert torch.equal(ode(load(folder=tmp_path / "base"), 2, False), ode(load(), 2, False))
    write_pipeline(load(folder=tmp_path / "base"), tmp_path / "base", tmp_path / "export")
    assert type(DiffusionPipeline.from_pretrained(tmp_path / "export")).__name__ == "WanImageToVideoPipeline"


@pytest.mark.parametrize("schedule", ["scheduler", "linear"])
def test_sd3_without_t5_and_with_either_schedule(tiny_base: Path, schedule: str) -> None:
    settings = DiffusionSettings(height=16, width=32, guidance_scale=4.5)
    policy = resolve(POLICIES, "sd3", label="policy").load(
        tiny_base, settings, ALL, {"max_sequence_length": 1, "schedule": schedule}
    )
    ours = ode(policy, 5, True)
    pipeline = DiffusionPipeline.from_pretrained(tiny_base, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    call = {"sigmas": list(np.linspace(1, 1 / 5, 5))} if schedule == "linear" else {"num_inference_steps": 5}
    call |= {"height": 16, "width": 32, "guidance_scale": 4.5, "max_sequence_length": 1}
    assert torch.equal(ours, pipeline(PROMPTS, latents=noise(policy), output_type="latent", **call).images)


def rollout_of(policy: DiffusionPolicy, prompts: list[str] = PROMPTS, dtype: torch.dtype = torch.float32) -> Any:
    draws = {step: torch.randn(len(prompts), *noise(policy).shape[1:]) for step in range(4)}
    return sample(
        policy,
        conditioning(policy, policy.settings.guidance_scale > 1, prompts),
        noise(policy, len(prompts)),
        policy.sigmas(4),
        sampler=Sampler(kernel=FlowSDE(), solver=Euler(), storage_dtype=dtype),
        plans=[AllSteps().draw(4, 0, 1)] * len(prompts),
        noise=draws.__getitem__,
    )


@pytest.mark.parametrize(("guidance_scale", "dtype"), [(1.0, torch.float16), (4.5, torch.float32)])
def test_replay_equals_the_rollout_exactly(load: Load, guidance_scale: float, dtype: torch.dtype) -> None:
    policy = load(guidance_scale)
    rollout = rollout_of(policy, dtype=dtype)
    assert rollout.states.dtype == dtype
    cond, sigmas = conditioning(policy, guidance_scale > 1), policy.sigmas(4)
    for step in range(3):
        grid = grid_at(sigmas, torch.full((4,), step))
        before, after = rollout.states[:, step].float(), rollout.states[:, step + 1].float()
        velocity = policy.velocity(before, grid.sigma, cond)
        _, log_probs = replay(FlowSDE(), before, velocity, after, grid)
        assert torch.equal(log_probs.detach(), rollout.log_probs[:, step])


@BASE_CLASSES
def test_the_gradient_of_guidance_is_that_of_the_half_asked_for(family: str, load: Load) -> None:
    if family in ONCE:
        assert conditioning(load(4.5), True).negative is None
        return

    def gradients(train_negative: bool, detach: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        policy = load(4.5, train_negative=train_negative)
        trainable = TrainableDenoiser(policy, None, seed=0)
        cond, latents, sigma = conditioning(policy, True), noise(policy), torch.full((4,), 0.5)
        velocity = policy.velocity(latents, sigma, cond)
        if detach:
            assert cond.negative is not None
            negative, positive = (
                policy.velocity(latents, sigma, Conditioning(c)) for c in (cond.negative, cond.positive)
            )
            velocity = policy.guide(negative.detach(), positive, sigma, latents)
        # Not its square: Qwen-Image's guidance keeps the norm of the conditional half.
        (velocity * velocity.detach().roll(1, -1)).mean().backward()
        return velocity.detach(), [p.grad for p in trainable.parameters() if p.grad is not None]

    conditional, detached, both = gradients(False, False), gradients(True, True), gradients(True, False)
    torch.testing.assert_close(conditional[0], both[0], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(conditional[1], detached[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    assert any(not torch.allclose(a, b, rtol=1e-4) for a, b in zip(conditional[1], both[1], strict=True))


def test_a_known_prediction_without_the_prompt_is_not_computed_again(family: str, load: Load) -> None:
    policy = load(4.5)
    cond, latents, sigma = conditioning(policy, True), noise(policy), torch.full((4,), 0.5)
    with torch.no_grad():
        expected, unconditional = policy.guided_velocity(latents, sigma, cond)
    assert (unconditional is None) == (family in ONCE)
    rows: list[int] = []
    for module in policy.denoisers.values():
        module.register_forward_hook(lambda module, args, output: rows.append(len(output[0])))
    known = dataclasses.replace(cond, unconditional=unconditional)
    for wanted in (True, False):
        rows.clear()
        with torch.set_grad_enabled(wanted):
            found = policy.velocity(latents, sigma, known)
        # Rows with images of their own sizes are computed one by one.
        assert sum(rows) == 4
        torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-5)


@BASE_CLASSES
def test_rows_with_mixed_steps_equal_their_own(load: Load) -> None:
    policy = load(4.5)
    rollout = rollout_of(policy)
    cond, sigmas = conditioning(policy, True), policy.sigmas(4)
    steps = torch.tensor([0, 1, 2, 0])
    rows = torch.arange(4)
    grid = grid_at(sigmas, steps)
    velocity = policy.velocity(rollout.states[rows, steps], grid.sigma, cond)
    _, mixed = replay(FlowSDE(), rollout.states[rows, steps], velocity, rollout.states[rows, steps + 1], grid)
    torch.testing.assert_close(mixed.detach(), rollout.log_probs[rows, steps], rtol=0, atol=1e-6)


def heard_again(policy: Any, final: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the encoded sounds of final latents, from an autoencoder that returns what it decoded."""
    vae, form = policy.pipeline.audio_vae, policy.sound_form
    decode, given = vae.decode, list[torch.Tensor]()

    def keep(z: torch.Tensor, **options: Any) -> Any:
        given.append(z)
        return decode(z, **options)

    monkeypatch.setattr(vae, "decode", keep)
    sounds = policy.sounds(final)
    assert sounds.shape[::2] == (2, form.channels)
    silence = torch.zeros(2, form.channels, form.length)
    # Of a sound of this length its own encoder makes as many.
    assert policy.encode_sounds(silence).shape == policy.apart(final)[1].shape
    monkeypatch.setattr(vae, "encode", lambda *_, **__: (SimpleNamespace(mode=lambda: given[-1]),))
    found: torch.Tensor = policy.encode_sounds(silence)
    return found


def test_given_media_are_encoded_as_samples_are_decoded(
    family: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = cast(Any, load())
    cond = conditioning(policy, False, PROMPTS[:2])
    latents, vae, given, taken = noise(policy, 2), policy.pipeline.vae, list[torch.Tensor](), [0]

    def decode(z: torch.Tensor, *_: Any, **__: Any) -> Any:
        given.extend(z.split(1))
        return Decoded((z[:, :3],))

    def encode(media: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        taken[0] += len(media)
        return (torch.cat(given[taken[0] - len(media) : taken[0]]),)

    monkeypatch.setattr(vae, "decode", decode)
    monkeypatch.setattr(vae, "encode", encode)
    shape = (2, 3, policy.settings.frames, 8, 8) if policy.settings.frames > 1 else (2, 3, 8, 8)
    policy.decoded_clean(policy.finished(latents, cond))
    found = policy.encode_media(torch.zeros(shape))
    if spec_of(family).frame_rate is not None:
        found = torch.cat([found, heard_again(policy, policy.finished(latents, cond), monkeypatch)], dim=1)
    torch.testing.assert_close(found, latents, rtol=2e-5, atol=2e-5)
    assert policy.velocity(found, torch.full((2,), 0.5), cond).shape == latents.shape


def test_encoding_a_prompt_does_not_depend_on_its_neighbors(load: Load) -> None:
    policy = load()
    together = encode(policy, PROMPTS)
    others = encode(policy, [PROMPTS[0], "a cat", "a red sign that says 9", "two"])
    for name in together:
        assert torch.equal(together[name][0], others[name][0])


def test_positions_masks_and_lengths_are_whole_numbers(load: Load) -> None:
    # As floats, the model's dtype would round them: bfloat16 has whole numbers only up to 256.
    for name, rows in encode(load(), PROMPTS).items():
        whole = bool((rows == rows.round()).all()) and name != "condition"
        assert rows.dtype == (torch.int64 if whole else torch.float32), name


@BASE_CLASSES
def test_text_encoders_and_vae_are_loaded_only_when_asked(family: str, load: Load) -> None:
    texts = load(parts=resolve(POLICIES, family, label="policy").parts_to_encode(TINY[family].options))
    assert len(next(iter(encode(texts, ["a cat"]).values()))) == 1
    assert (texts.pipeline.vae is None) == (spec_of(family).starts_from == "text")
    assert all(parameter.is_meta for module in texts.denoisers.values() for parameter in module.parameters())
    rest = load(parts=frozenset({Part.DENOISER, Part.VAE}))
    assert rest.pipeline.text_encoder is None


def test_published_lora_targets_match(load: Load) -> None:
    policy = load()
    for name, module in policy.denoisers.items():
        check_lora_targets(name, module, policy.lora_targets)
        with pytest.raises(ConfigError, match=r"'attn\.to_nowhere', .* matches no layer"):
            check_lora_targets(name, module, ["attn.to_nowhere"])


@BASE_CLASSES
def test_fresh_lora_changes_nothing_and_can_be_switched_off(load: Load) -> None:
    policy = load(4.5)
    cond, latents = conditioning(policy, True), noise(policy)
    sigma = torch.full((4,), 0.5)
    base = policy.velocity(latents, sigma, cond)
    trainable = TrainableDenoiser(policy, LoraSpec(rank=2, alpha=4, targets=policy.lora_targets), seed=1)
    assert torch.equal(policy.velocity(latents, sigma, cond).detach(), base)
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.add_(0.1)
    assert not torch.equal(policy.velocity(latents, sigma, cond).detach(), base)
    assert torch.equal(trainable.reference_velocity(latents, sigma, cond), base)


@BASE_CLASSES
def test_merged_adapters_compute_and_learn_what_adapters_beside_the_weights_do(load: Load) -> None:
    policy = load(4.5)
    trainable = TrainableDenoiser(policy, LoraSpec(rank=2, alpha=4, targets=policy.lora_targets), seed=1)
    inputs = (noise(policy), torch.full((4,), 0.5), conditioning(policy, True))
    weights = {name: value.clone() for name, value in next(iter(policy.denoisers.values())).state_dict().items()}

    def learned() -> list[torch.Tensor]:
        velocity = policy.velocity(*inputs)
        gradients = torch.autograd.grad((velocity**2).mean(), trainable.parameters(), allow_unused=True)
        used = [gradient for gradient in gradients if gradient is not None]
        return [velocity.detach(), *used]

    def check() -> torch.Tensor:
        together = learned()
        with torch.no_grad():
            merged = policy.velocity(*inputs)
        assert trainable.merged is not None
        trainable.merged.remove()
        apart = learned()
        trainable.merged = Merged(policy.denoisers.values())
        torch.testing.assert_close(merged, together[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(together[0], apart[0], rtol=2e-5, atol=2e-5)
        # Of some layers the gradient is 0, but for rounding.
        largest = max(float(gradient.abs().max()) for gradient in apart[1:])
        for ours, theirs in zip(together[1:], apart[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * largest)
        return merged

    found = [check()]
    other = [torch.full_like(parameter, 0.02) for parameter in trainable.parameters()]
    optimizer = torch.optim.AdamW(trainable.parameters(), lr=0.05)
    for _ in range(2):
        (policy.velocity(*inputs) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(check())
        for _ in range(2):
            torch._foreach_add_(other, 0.02)
            with trainable.holding(other):
                found.append(check())
        assert torch.equal(check(), found[-3])
    assert all(not torch.equal(one, two) for one, two in itertools.combinations(found, 2))
    left = next(iter(policy.denoisers.values())).state_dict()
    assert all(torch.equal(left[name], value) for name, value in weights.items() if "lora" not in name)


@pytest.mark.campaign
@pytest.mark.parametrize("family", ["sd3"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_compute_what_eager_ones_do(load: Load, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the family whose repeated blocks diffusers does not name; of two backends, as inductor takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    found = []
    for compiled in (False, True):
        torch._dynamo.utils.counters.clear()
        policy = load(compile=compiled)
        trainable = TrainableDenoiser(policy, LoraSpec(rank=2, alpha=4, targets=policy.lora_targets), seed=1)
        inputs = (noise(policy), torch.full((4,), 0.5), conditioning(policy, False))
        with torch.no_grad():
            torch._foreach_add_(trainable.parameters(), 0.02)
            sampled = policy.velocity(*inputs)
        velocity = policy.velocity(*inputs)
        velocity.square().mean().backward()
        gradients = [p.grad for p in trainable.parameters() if p.grad is not None]
        reference = trainable.reference_velocity(*inputs)
        found.append([sampled, velocity.detach(), reference, *gradients])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for eager, compiled_one in zip(*found, strict=True):
        torch.testing.assert_close(compiled_one, eager, rtol=1e-4, atol=1e-5)


@BASE_CLASSES
def test_half_precision_and_full_weights_merge_nothing(load: Load) -> None:
    policy = load(dtype=torch.bfloat16)
    assert TrainableDenoiser(policy, LoraSpec(rank=2, alpha=4, targets=policy.lora_targets), seed=1).merged is None
    assert TrainableDenoiser(load(), None, seed=1).merged is None


@pytest.mark.parametrize("lora", [True, False])
def test_a_training_step_lowers_the_loss_and_reaches_every_parameter(family: str, load: Load, lora: bool) -> None:
    policy = load()
    spec = LoraSpec(rank=2, alpha=4, targets=policy.lora_targets) if lora else None
    trainable = TrainableDenoiser(policy, spec, seed=0)
    cond, latents, sigma = conditioning(policy, False), noise(policy), torch.full((4,), 0.9)
    optimizer = torch.optim.Adam(trainable.parameters(), lr=1e-2 if lora else 1e-3)
    losses = []
    for _ in range(3):
        loss = (policy.velocity(latents, sigma, cond) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    without = [name for name, parameter in trainable.named_parameters() if parameter.grad is None]
    # The last joint block's text stream ends unused in every MMDiT; of Wan 2.2 one transformer sees these rows, and of
    # FLUX.3 what reads images to start from nothing.
    further = {"flux3": "image_cond.", **dict.fromkeys(TWO, "transformer_2.")}
    unused = ("transformer_blocks.1.", further.get(family, "transformer_blocks.1."))
    assert all(any(part in name for part in unused) for name in without), without


@BASE_CLASSES
def test_equal_seeds_give_equal_lora_weights_whatever_the_global_generator(load: Load) -> None:
    states = []
    for _ in range(2):
        torch.rand(7)
        policy = load()
        before = torch.get_rng_state()
        states.append(TrainableDenoiser(policy, LoraSpec(rank=2, alpha=4, targets=policy.lora_targets), seed=3).state())
        assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@BASE_CLASSES
def test_gradient_checkpointing_gives_equal_gradients(load: Load) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = load(gradient_checkpointing=checkpointing)
        trainable = TrainableDenoiser(policy, None, seed=0)
        for module in policy.denoisers.values():
            module.train()
        policy.velocity(noise(policy), torch.full((4,), 0.5), conditioning(policy, False)).pow(2).mean().backward()
        gradients.append([p.grad for p in trainable.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_sizes_the_model_cannot_take(family: str, load: Load) -> None:
    unit = resolve(POLICIES, family, label="policy").size_unit
    with pytest.raises(ConfigError, match=f"The nearest are {2 * unit} and {3 * unit}"):
        load(height=2 * unit + 3)
    with pytest.raises(ConfigError, match=f"The nearest are {unit} and {2 * unit}"):
        load(height=3)


def test_frames_the_model_cannot_take(family: str, load: Load) -> None:
    nearest = {4: "4 n + 1 frames. The nearest are 5 and 9", 8: "8 n + 1 frames. The nearest are 1 and 9"}
    nearest |= {17: r"17 n + 5 frames, 124 to 345 of them (5 to 15 seconds). The nearest is 124"}
    message = re.escape(nearest[clips.every] if (clips := spec_of(family).clips) else "makes images. Set it to 1")
    with pytest.raises(ConfigError, match=message):
        load(frames=7)


def test_the_exported_lora_gives_our_images_in_plain_diffusers(
    family: str, load: Load, folder: Path, tmp_path: Path
) -> None:
    policy = load()
    trainable = TrainableDenoiser(policy, LoraSpec(rank=2, alpha=8, targets=policy.lora_targets), seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(trainable.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05)
    # Theirs computes adapters next to the weights.
    assert trainable.merged is not None
    trainable.merged.remove()
    cond, latents, sigma = conditioning(policy, False), noise(policy), torch.full((4,), 0.9)
    ours = policy.velocity(latents, sigma, cond).detach()
    policy.save_lora(tmp_path)
    fresh = load()
    before = fresh.velocity(latents, sigma, cond)
    call = fresh.pipeline_call(4, None)
    assert call is not None
    loader = fresh.pipeline.load_lora_weights if call.loads_adapters else fresh.pipeline.transformer.load_lora_adapter
    loader(tmp_path, weight_name=LORA_FILE)
    if family in TWO:
        fresh.pipeline.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
        low = torch.full((4,), 0.3)
        torch.testing.assert_close(policy.velocity(latents, low, cond), fresh.velocity(latents, low, cond))
    theirs = fresh.velocity(latents, sigma, cond).detach()
    assert not torch.allclose(ours, before, atol=1e-3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_scheduler_that_cannot_be_followed_is_refused(family: str, load: Load, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = index_file(tmp_path / "model")
    entry = component_entry(path.name, "scheduler", "diffusers", "HeunDiscreteScheduler")
    path.write_text(json.dumps({**json.loads(path.read_text()), "scheduler": entry}))
    # That of modular pipelines is their blocks', until a folder has one.
    (tmp_path / "model" / "scheduler").mkdir(exist_ok=True)
    tiny = TINY[family]
    settings = DiffusionSettings(height=tiny.size, width=tiny.size, frames=tiny.frames)
    with pytest.raises(ConfigError, match="has the scheduler HeunDiscreteScheduler, whose schedule"):
        resolve(POLICIES, family, label="policy").load(tmp_path / "model", settings, ALL, tiny.options)


@BASE_CLASSES
def test_an_autoencoder_is_loaded_in_the_dtype_it_computes_in(load: Load, family: str, folder: Path) -> None:
    vae = load(dtype=torch.bfloat16).pipeline.vae
    stored = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    held = {name: tensor for name, tensor in vae.state_dict().items() if name in stored}
    assert set(held) == set(stored)
    assert all(torch.equal(held[name], stored[name]) for name in stored), "rounded on the way"


@BASE_CLASSES
def test_a_process_that_only_trains_frees_the_decoder(load: Load) -> None:
    policy = load()
    cond, latents, sigma = conditioning(policy, False), noise(policy), torch.full((4,), 0.5)
    before = policy.velocity(latents, sigma, cond)
    policy.move_decoder(torch.device("meta"))
    assert all(parameter.is_meta for parameter in policy.pipeline.vae.parameters())
    assert torch.equal(policy.velocity(latents, sigma, cond), before)
    assert torch.equal(noise(policy), latents)


@BASE_CLASSES
def test_a_process_that_never_decodes_samples_the_same_latents_without_an_autoencoder(load: Load) -> None:
    whole, without = load(), load(parts=frozenset({Part.DENOISER}))
    assert all(parameter.is_meta for parameter in without.pipeline.vae.parameters())
    assert torch.equal(noise(without), noise(whole))
    assert torch.equal(without.sigmas(4), whole.sigmas(4))
    cond, sigma = conditioning(whole, False), torch.full((4,), 0.5)
    assert torch.equal(without.velocity(noise(without), sigma, cond), whole.velocity(noise(whole), sigma, cond))
    without.move_decoder(torch.device("cpu"))


@BASE_CLASSES
def test_an_attention_backend_is_that_of_one_model(load: Load) -> None:
    policy = load()
    cond, latents, sigma = conditioning(policy, False), noise(policy), torch.full((4,), 0.5)
    before = policy.velocity(latents, sigma, cond)
    load(attention="_native_math").velocity(latents, sigma, cond)
    assert torch.equal(load().velocity(latents, sigma, cond), before)


@BASE_CLASSES
def test_large_images_are_decoded_in_tiles_and_small_ones_whole(family: str, load: Load) -> None:
    # Some tiles are of 512 pixels; LTX-2's are mirrored at their edges, for which they have two latents at least.
    large, small = 640 if family in ("sana", "ltx2", "ltx2_i2v") else 320, 64 if family.startswith("ltx2") else 32
    for height, same in ((large, False), (small, True)):
        whole, tiled = (load(height=height, width=small, vae_tiling=tiling) for tiling in (False, True))
        latents = noise(whole, 1)
        if not spec_of(family).decodes_latents:
            latents = whole.finished(latents, conditioning(whole, False, PROMPTS[:1]))
        images = [policy.decode(latents) for policy in (whole, tiled)]
        assert images[0].shape == images[1].shape
        assert torch.equal(*images) is same


def test_gradients_pass_through_images_that_are_those_that_are_decoded(family: str, load: Load) -> None:
    policy = load()
    latents = noise(policy, 2).requires_grad_(True)
    if not spec_of(family).decodes_latents:
        with pytest.raises(ConfigError, match="decoded with the image they start from"):
            policy.decode_smoothly(latents)
        return
    clean = policy.clean_latents(latents)
    images = policy.decode_smoothly(clean)
    rounded = (images.detach().clamp(0, 1) * 255).round().to(torch.uint8).movedim(-3, -1)
    assert torch.equal(rounded, policy.decode(latents.detach()))
    # What is decoded of a chain's end follows from the level it ends at, which is what is stored of it.
    assert torch.equal(clean, clean_ends(latents, policy.sigmas(4)[-1:]))
    assert torch.equal(clean, latents) is (spec_of(family).noise_range is None)
    # However far a value is beyond white, a brighter one differs from it.
    far = policy.decode_smoothly(20 * latents)
    (slope,) = torch.autograd.grad(far.flatten(1).sum(), latents)
    assert torch.isfinite(slope).all()
    # What is heard is not seen.
    seen, *heard = policy.apart(slope) if isinstance(policy, LTX2) else (slope,)
    assert (seen != 0).float().mean() > 0.9
    assert not any(part.any() for part in heard)


@pytest.mark.parametrize("family", family_params(("flux1",), ("flux1",)))
def test_backends_that_check_accepts_train_on_cpus(load: Load) -> None:
    accepted, sigma = [], torch.tensor([0.9, 0.4])
    for name in BACKENDS:
        with suppress(ConfigError):
            settings = [f"model.attention={name}", "model.dtype=bfloat16", "execution.device=cpu"]
            check_config(load_config("tiny_flux1", settings))
            accepted.append(name)
    assert accepted == ["native", "_native_math", "_native_flash"]
    for name in accepted:
        policy = load(attention=name, dtype=torch.bfloat16)
        TrainableDenoiser(policy, None, seed=0)
        policy.velocity(noise(policy, 2), sigma, conditioning(policy, False, PROMPTS[:2])).sum().backward()


@pytest.mark.parametrize("family", family_params(("flux1",), ("flux1",)))
def test_a_backend_without_its_package_is_refused_with_its_name(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.models.attention_dispatch._CAN_USE_FLASH_ATTN", False)
    with pytest.raises(ConfigError, match=r"is 'flash', but .*Please install `flash-attn"):
        load(attention="flash")


@pytest.mark.parametrize("family", family_params(("z_image", "flux1"), sorted(set(PIPELINES) - FIXED)))
def test_backends_without_masks_are_refused_where_texts_of_unlike_lengths_need_one(family: str, load: Load) -> None:
    longer = {"options": {"max_sequence_length": 256}} if family in MASKED else {}
    policy = load(attention="_native_flash", dtype=torch.bfloat16, **longer)
    cond, latents = conditioning(policy, False, ["a cube", " ".join(PROMPTS)]), noise(policy, 2)
    with pytest.raises(ValueError, match="mask") if family in MASKED else nullcontext():
        policy.velocity(latents, torch.tensor([0.9, 0.4]), cond)


def test_ranks_in_step_run_every_denoiser_and_get_the_same(load: Load) -> None:
    policy = load()
    cond, latents = conditioning(policy, False), noise(policy)
    calls: list[str] = []
    for name, module in policy.denoisers.items():
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    for levels in ([0.99, 0.98, 0.97, 0.96], [0.99, 0.1, 0.98, 0.2], [0.1, 0.2, 0.3, 0.4]):
        sigma = torch.tensor(levels)
        policy.lockstep = False
        expected = policy.velocity(latents, sigma, cond)
        policy.lockstep = True
        calls.clear()
        torch.testing.assert_close(policy.velocity(latents, sigma, cond), expected, rtol=1e-4, atol=1e-5)
        # Rows with images of their own sizes are computed one by one, as many on every rank.
        assert calls == list(policy.denoisers) * (4 if row_by_row(policy) else 1)


@pytest.mark.parametrize("family", family_params(PIPELINES, ("flux3",)))
@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        (MODULAR, {"vae": ["diffusers", "AutoencoderKL", {}]}, "has the vae AutoencoderKL, but .*AutoencoderKLFlux2"),
        (MODULAR, {"scheduler": [None, None, {}]}, "has no folder 'scheduler', which 'flux3' loads"),
        (
            MODULAR,
            {"vae": [None, None, {"type_hint": "os"}]},
            "is not a whole pipeline: .* says of 'vae' 'os', not its",
        ),
        ("transformer/config.json", {"flow_map": True}, r"is distilled \(flow_map in transformer/config\.json\)"),
        ("guider/guider_config.json", {"stop": 0.5}, r"stop of its guider ClassifierFreeGuidance is 0\.5, which"),
        ("text_encoder", None, "has no folder 'text_encoder', which 'flux3' loads; its modular_model_index.json may"),
    ],
)
def test_a_modular_folder_of_another_meaning_is_refused(
    load: Load, folder: Path, tmp_path: Path, file: str, change: dict[str, Any] | None, expected: str
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    store_guider({"guidance_scale": 2.0}, tmp_path / "model")
    load(folder=tmp_path / "model", parts=frozenset({Part.DENOISER}))
    path = tmp_path / "model" / file
    if change is None:
        shutil.rmtree(path)
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=expected):
        load(folder=tmp_path / "model", parts=frozenset({Part.DENOISER}), options={"max_sequence_length": 80})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"guidance_rescale": 0.7}, "guidance_rescale of its guider ClassifierFreeGuidance is 0.7, which"),
        ({"stop": 0.5}, "stop of its guider ClassifierFreeGuidance is 0.5, which"),
    ],
)
def test_a_guider_that_guides_otherwise_is_refused(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    pipeline = build_tiny("hunyuan_video15")
    pipeline.guider = diffusers.ClassifierFreeGuidance(**change)
    pipeline.save_pretrained(tmp_path)
    settings, cls = (
        DiffusionSettings(height=32, width=32, frames=5),
        resolve(POLICIES, "hunyuan_video15", label="policy"),
    )
    with pytest.raises(ConfigError, match=expected):
        cls.load(tmp_path, settings, ALL, {})
    path = tmp_path / "model_index.json"
    path.write_text(path.read_text().replace("ClassifierFreeGuidance", "PerturbedAttentionGuidance"))
    with pytest.raises(ConfigError, match="has the guider PerturbedAttentionGuidance, but"):
        cls.load(tmp_path, settings, ALL, {})


def test_what_prompts_put_in_quotes_is_read_apart(tmp_path: Path) -> None:
    build_tiny("hunyuan_video15").save_pretrained(tmp_path)
    settings, cls = (
        DiffusionSettings(height=32, width=32, frames=5),
        resolve(POLICIES, "hunyuan_video15", label="policy"),
    )
    options = {"max_sequence_length": 24}
    rows = cls.load(tmp_path, settings, frozenset({Part.TEXT}), options).encode(["a sign", 'a sign "9"'])
    # A byte is a token, and the end is one.
    assert rows["glyph_mask"].sum(1).tolist() == [0, len('Text "9". ') + 1]
    assert not rows["glyph_embeds"][0].any()


def test_clips_of_another_autoencoder_are_refused(tmp_path: Path) -> None:
    build_tiny("sana_video").save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["vae"] = ["diffusers", "AutoencoderKLLTX2Video"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    settings = DiffusionSettings(height=64, width=64, frames=5)
    with pytest.raises(ConfigError, match=r"the autoencoder AutoencoderKLLTX2Video, but .*Use a model of 480 pixels"):
        resolve(POLICIES, "sana_video", label="policy").load(tmp_path, settings, ALL, {})


@pytest.mark.parametrize(
    ("family", "built", "expected"),
    [
        ("wan21", "wan22_ti2v", r"is a Wan 2\.2 TI2V model.*Set model\.policy to 'wan22_ti2v'"),
        ("wan22_ti2v", "wan21", r"is no Wan 2\.2 TI2V model.*Choose the policy of that Wan"),
        ("wan21_v2v", "wan22", r"has two transformers.*Use a Wan 2\.1 model of text to video"),
    ],
)
def test_a_wan_of_another_family_is_refused(family: str, built: str, expected: str, tmp_path: Path) -> None:
    build_tiny(built).save_pretrained(tmp_path)
    settings = DiffusionSettings(height=32, width=32, frames=5)
    with pytest.raises(ConfigError, match=expected):
        resolve(POLICIES, family, label="policy").load(tmp_path, settings, ALL, {})


def test_stable_diffusion_is_sampled_with_ddim_whatever_its_folder_names(tmp_path: Path) -> None:
    pipeline = build_tiny("sd15")
    pipeline.scheduler = PNDMScheduler.from_config(pipeline.scheduler.config)
    pipeline.save_pretrained(tmp_path)
    settings = DiffusionSettings(height=64, width=64)
    policy = resolve(POLICIES, "sd15", label="policy").load(tmp_path, settings, ALL, {"steps": 4})
    other = resolve(POLICIES, "sd15", label="policy")(build_tiny("sd15"), settings, policy.options)
    assert torch.equal(policy.sigmas(4), other.sigmas(4))
    assert len(policy.sigmas(4)) == 5


@BASE_CLASSES
def test_another_pipeline_is_refused(family: str, tmp_path: Path) -> None:
    cls = resolve(POLICIES, family, label="policy")
    (tmp_path / cls.index_name).write_text('{"_class_name": "OtherPipeline"}')
    with pytest.raises(ConfigError, match="holds a OtherPipeline"):
        cls.load(tmp_path, DiffusionSettings(height=16, width=32), ALL, {})
    with pytest.raises(ConfigError, match=rf"no {cls.index_name}"):
        cls.load(tmp_path / "none", DiffusionSettings(height=16, width=32), ALL, {})


@BASE_CLASSES
def test_full_weights_in_bfloat16_start_at_the_base_model(load: Load) -> None:
    # Trained weights are float32 and the frozen ones bfloat16; before the first update a KL between them is exactly 0.
    policy = load(dtype=torch.bfloat16)
    cond, latents = conditioning(policy, False, PROMPTS[:2]), noise(policy, 2)
    sigma = torch.tensor([0.9, 0.4])
    trainable = TrainableDenoiser(policy, None, seed=0)
    trainable.set_reference(load(dtype=torch.bfloat16, parts=frozenset({Part.DENOISER})))
    trainable.set_teacher(load(dtype=torch.bfloat16, parts=frozenset({Part.DENOISER})))
    velocity = policy.velocity(latents, sigma, cond)
    assert velocity.requires_grad
    assert torch.equal(velocity.detach(), trainable.reference_velocity(latents, sigma, cond))
    assert torch.equal(velocity.detach(), trainable.teacher_velocity(latents, sigma, cond))
    # The frozen copy does not cost the memory of float32: its large weights stay as they were.
    assert trainable._reference is not None
    frozen = [p for module in trainable._reference.values() for p in module.parameters()]
    sizes = {dtype: sum(p.numel() for p in frozen if p.dtype == dtype) for dtype in (torch.bfloat16, torch.float32)}
    assert not any(p.requires_grad for p in frozen)
    assert sizes[torch.bfloat16] > 5 * sizes[torch.float32]


@BASE_CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2, alpha=4, targets=())], ids=["full", "lora"])
def test_a_model_made_empty_reads_the_weights_that_loading_gives(
    load: Load, dtype: torch.dtype, lora: LoraSpec | None
) -> None:
    found = []
    for empty in (False, True):
        policy = load(dtype=dtype, parts=frozenset({Part.DENOISER}), empty=empty)
        spec = lora and dataclasses.replace(lora, targets=policy.lora_targets)
        trainable = TrainableDenoiser(policy, spec, seed=3)
        for name, module in policy.denoisers.items():
            assert all(p.is_meta is (empty and ".lora_" not in key) for key, p in module.named_parameters())
            if empty:
                policy.stored[name].give(module, torch.device("cpu"))
        modules = policy.denoisers.items()
        found.append({f"{name}.{key}": t for name, made in modules for key, t in made.state_dict().items()})
        trained = dict(trainable.named_parameters())
        assert {name for name, _ in trained.items()} <= set(found[-1])
        # What no file has is computed when the model is made.
        buffers = [(f"{name}.{key}", b) for name, made in modules for key, b in made.named_buffers()]
        found[-1] |= {f"buffer {name}": tensor for name, tensor in buffers}
    loaded, read = found
    assert loaded.keys() == read.keys()
    for name, tensor in loaded.items():
        assert read[name].dtype == tensor.dtype, name
        assert torch.equal(read[name], tensor), name
    # A base model's weights are those of its files, in the dtype it is loaded in.
    targets = {name: torch.empty_like(p) for name, p in trainable.named_parameters()}
    if lora is None:
        trainable.fill(targets, None)
        assert all(torch.equal(targets[name], loaded[name]) for name in targets)


@BASE_CLASSES
def test_a_model_without_safetensors_files_is_refused(load: Load, folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    weights = next(copied.glob("[tu]*/diffusion_pytorch_model.safetensors"))
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ConfigError, match=r"has no diffusion_pytorch_model\.safetensors.*save_pretrained"):
        load(folder=copied, parts=frozenset({Part.DENOISER}))


STARTING = pytest.mark.parametrize("family", family_params(PIPELINES, ("wan21_v2v",)))


@STARTING
@pytest.mark.parametrize("strength", [0.3, 0.7, 1.0])
def test_a_share_of_a_schedule_is_that_of_the_pipeline(load: Load, strength: float) -> None:
    policy = load(options={"strength": strength})
    for steps in range(1, 25):
        call, sigmas = policy.pipeline_call(steps, None), policy.sigmas(steps)
        assert call is not None
        # As the pipeline's get_timesteps counts.
        assert int(call.arguments["num_inference_steps"] * strength) == steps == len(sigmas) - 1
        assert bool((sigmas[1:] < sigmas[:-1]).all())
    assert (float(sigmas[0]) == 1) == (strength == 1)


def test_families_that_start_from_clips_are_known_without_them() -> None:
    found = {name for name in PIPELINES if resolve(POLICIES, name, label="policy").starts_from_clips}
    assert found == {*families(lambda spec: spec.starts_from == "clip")}


@STARTING
def test_the_higher_the_strength_the_less_is_left_of_a_clip(load: Load) -> None:
    apart = []
    for strength in (0.3, 0.6, 1.0):
        policy = load(options={"strength": strength})
        cond, start = conditioning(policy, False), noise(policy)
        started = policy.started(start, policy.sigmas(6), cond)
        apart.append(float((started - cond.positive["source"]).square().mean()))
    assert apart == sorted(apart)
    assert torch.equal(started, start)


@STARTING
def test_an_image_is_a_clip_that_stands_still_and_a_short_clip_is_refused(load: Load) -> None:
    policy, (film,) = load(), (pictures("wan21_v2v", 1) or [])[0]
    still = policy.encode(["a cat"], [[film[0]]])["source"]
    assert torch.equal(still, policy.encode(["a cat"], [[np.repeat(film[:1], 5, axis=0)]])["source"])
    # Of seven frames the first five are taken.
    assert torch.equal(*(policy.encode(["a cat"], [[each]])["source"] for each in (film, film[:5])))
    with pytest.raises(ConfigError, match=r"the clip of prompt 'a cat' has 4 frames, but model\.frames is 5"):
        policy.encode(["a cat"], [[film[:4]]])


def test_a_policy_that_is_sized_is_one_of_that_size(family: str, load: Load) -> None:
    tiny = TINY[family]
    if most_images(family, tiny.options):
        pytest.skip("its prompts come with images, whose size is that of rollouts")
    size = {
        "height": tiny.size,
        "width": 2 * tiny.size,
        "frames": tiny.frames + (clips.every if (clips := spec_of(family).clips) else 0),
    }
    sized, other = load(), load(**size)

    def drawn(policy: DiffusionPolicy) -> list[torch.Tensor]:
        latents, cond = noise(policy), conditioning(policy, False)
        velocity = policy.velocity(latents, torch.full((4,), 0.5), cond)
        return [latents, policy.sigmas(4), velocity, policy.decode(latents)]

    before = drawn(sized)
    with sized.sized(**size):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(drawn(sized), drawn(other), strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(drawn(sized), before, strict=True))
    assert before[0].shape != drawn(other)[0].shape
