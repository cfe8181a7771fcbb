"""Fingerprints hold what changes results and nothing else: tables by stage, and results that were really computed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from pydantic import BaseModel

from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.load import load_config
from flowmill.configs.model_families import families, spec_of
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Sampler, ode_plan, sample
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE
from flowmill.models.policies import POLICIES
from flowmill.models.policies.attention import BACKENDS, attention_identity
from flowmill.models.policies.diffusion import DiffusionPolicy, DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.diffusion import DiffusionSpec
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.specs.stages import STAGES
from tests.conftest import ROOT
from tests.support.inside import Make, make_stage, prepare, run_stage
from tests.support.pins import FIT, PINS, PRESETS, changed

LORA = "model.lora={rank: 2, alpha: 4}"
GUIDED = "model.guidance_scale=3"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of all configs, in which nothing is made."""
    return tmp_path_factory.mktemp("store")


@cache
def identity(root: Path, stage: str, family: str, *overrides: str) -> str:
    """Return the hash of the options by which a stage of a tiny preset is named, without its inputs."""
    config = load_config(ROOT / "configs" / f"tiny_{family}.yaml", [f"store.root={root}", *overrides])
    store = ArtifactStore(config.store)
    context = RunContext(store, config, RunFolder(store, "tiny"))
    slot = config.rewards[0].slot if stage == "score" else ""
    return fingerprint(dict(make_stage(context, stage, int(STAGES[stage].scope == "epoch"), slot).options()))


#: (stage, family, what both have, what changes the result).
CHANGES: list[tuple[str, str, list[str], str]] = [
    ("base", "sd3", [], "model.build.options.seed=1"),
    *[("encode", "sd3", [], change) for change in ("model.options.max_sequence_length=32", "model.dtype=bfloat16")],
    *[
        ("encode", family, [], change)
        for family in families(lambda spec: spec.starts_from != "text")
        for change in ("model.height=96", "model.width=96")
    ],
    *[("encode", family, [], "model.frames=9") for family in ("wan21_i2v", "wan22_i2v", "wan21_v2v")],
    ("encode", "qwen_image_edit", [], "model.options.condition_area=9216"),
    *[
        ("encode", family, [], f"model.options.{change}")
        for family in families(lambda spec: spec.references is not None)
        for change in ("references=3", "reference_area=9216")
    ],
    ("preprocess", "sd3", [], "model.guidance_scale=1"),
    ("preprocess", "sd3", [GUIDED], "model.negative_prompt=blurry"),
    *[
        ("rollout", "sd3", [], change)
        for change in (
            "model.options.schedule=linear",
            "optimize.algorithm={name: grpo_guard}",
            "model.attention=sage",
            "model.attention=my_backend",
            "rollout.sampler.options={noise_level: 0.5}",
            "rollout.plan.options={last: train}",
            "rollout.store=parquet",
        )
    ],
    *[
        (stage, family, [], f"model.guidance_scale={scale}")
        for stage in ("rollout", "evaluate")
        for family in families(lambda spec: spec.guidance == "input")
        for scale in (0, 0.5, 1)
    ],
    *[(stage, "sd3", [GUIDED], "model.negative_prompt=blurry") for stage in ("rollout", "evaluate")],
    ("evaluate", "sd3", [], "evaluate.steps=9"),
    *[("rollout", family, [], "model.frames=17") for family in families(lambda spec: spec.clips)],
    ("score", "sd3", [], "rewards.0.options={scale: 1}"),
    ("advantage", "sd3", [], "rewards.0.weight=2"),
    ("advantage", "sd3", ["advantage.std=global"], "advantage.mean=global"),
    ("advantage", "sd3", [], "advantage.clip=[-2, 5]"),
    ("advantage", "sd3", [], "advantage.soft_clip=3"),
    ("advantage", "sd3", ["monitors=[{name: digits}]"], "advantage.diversity=digits"),
    ("optimize", "sd3", [], "optimize.algorithm={name: tempflow}"),
    *[("optimize", "sd3", ["optimize.replay={epochs: 1}"], f"optimize.replay.{c}") for c in ("share=0.5", "steps=1")],
]
EXECUTION = ("execution.device=cpu", "model.attention=native", "model.attention=flash")
#: (stage, family, what both have, what leaves the result as it is).
KEEPS: list[tuple[str, str, list[str], str]] = [
    *[(stage, "flux1", [], change) for stage in ("encode", "rollout", "optimize", "evaluate") for change in EXECUTION],
    *[
        ("encode", "sd3", [], change)
        for change in ("model.height=96", "model.width=96", GUIDED, LORA, "model.options.schedule=linear")
    ],
    ("encode", "sd15", [], "model.options.steps=9"),
    ("encode", "sd15", [], "model.options.guidance_rescale=0.7"),
    ("rollout", "sd3", [], "rollout.own_noise=0"),
    ("optimize", "sd3", ["optimize.replay={epochs: 1}"], "optimize.replay.share=1"),
    *[
        ("encode", family, [], f"model.options.{option}=2")
        for family in families(lambda spec: spec.clips)
        for option in sorted(spec_of(family).not_encoded)
    ],
    *[("encode", family, [], "model.frames=9") for family in ("wan21", "wan22")],
    *[("encode", "flux1", [], change) for change in ("model.guidance_scale=0.5", "rollout.steps=9")],
    *[
        (stage, "sd3", ["model.guidance_scale=1"], change)
        for stage in ("rollout", "evaluate")
        for change in ("model.guidance_scale=0", "model.guidance_scale=0.5", "model.negative_prompt=blurry")
    ],
    *[("rollout", "sd3", [], change) for change in ("rewards.0.weight=2", "optimize.algorithm={name: tempflow}")],
    ("score", "sd3", [], "rewards.0.weight=2"),
    ("advantage", "sd3", [], "execution.score_workers=2"),
    *[("advantage", "sd3", [], change) for change in ("advantage.mean=group", "advantage.clip=5")],
    ("policy", "sd3", ["model.lora=null"], "run.seed=1"),
    ("preprocess", "sd3", ["model.guidance_scale=1"], "model.negative_prompt=blurry"),
]


#: Stages whose result a setting of a section changes, with the settings that differ from the rest of their section.
SECTIONS = {
    "model": "rollout evaluate",
    "rollout": "rollout",
    "advantage": "advantage",
    "optimize": "optimize",
    "evaluate": "evaluate",
    **dict.fromkeys(("critic", "execution", "export", "store", "tracking"), ""),
}
DIFFERENT = {
    "run.epochs": "",
    "run.seed": "policy rollout optimize",
    "model.dtype": "encode rollout evaluate",
    "model.frames": "rollout score evaluate",
    **dict.fromkeys(("model.lora.rank", "model.lora.alpha"), "policy"),
    **dict.fromkeys(("model.compile", "model.gradient_checkpointing", "rollout.groups_per_shard"), ""),
    "rollout.steps": "rollout evaluate",
    **{f"rollout.media.{name}": "rollout evaluate" for name in ("format", "fps", "latents", "lossless")},
    "advantage.kl_coef": "rollout advantage",
    **dict.fromkeys(("evaluate.every", "evaluate.images"), ""),
}
ALL_STAGES = ("base", "encode", "preprocess", "policy", "rollout", "score", "advantage", "optimize", "evaluate")


def plain_settings(section: type[BaseModel], value: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each switch, number and choice of a config that is set, with another value."""
    for name, field in section.model_fields.items():
        key, now = f"{prefix}{name}", getattr(value, name)
        choices = [each for kind in (field.annotation, *get_args(field.annotation)) for each in get_args(kind)]
        if isinstance(now, BaseModel):
            yield from plain_settings(type(now), now, f"{key}.")
        elif isinstance(now, bool):
            yield key, not now
        elif isinstance(now, int | float):
            yield key, now + 1 if isinstance(now, int) else now / 2 + 0.25
        elif isinstance(now, str) and now in (others := [*get_args(field.annotation), *choices]):
            yield key, next(each for each in others if each != now and isinstance(each, str))


@pytest.mark.slow
def test_every_plain_setting_changes_the_stages_of_its_section_alone(root: Path) -> None:
    settings = dict(plain_settings(RunConfig, load_config(ROOT / "configs" / "tiny_sd3.yaml")))
    assert len(settings) > 60
    found = {
        key: [s for s in ALL_STAGES if identity(root, s, "sd3") != identity(root, s, "sd3", f"{key}={other}")]
        for key, other in settings.items()
    }
    expected = {key: SECTIONS.get(key.partition(".")[0], "") for key in settings} | DIFFERENT
    assert found == {key: stages.split() for key, stages in expected.items()}


def reported(row: tuple[str, str, list[str], str]) -> str:
    return f"{row[0]}-{row[1]}-{row[3]}"


@pytest.mark.parametrize("row", CHANGES, ids=reported)
def test_what_changes_results_is_held(root: Path, row: tuple[str, str, list[str], str]) -> None:
    stage, family, both, change = row
    assert identity(root, stage, family, *both) != identity(root, stage, family, *both, change)


@pytest.mark.parametrize("row", KEEPS, ids=reported)
def test_what_leaves_results_as_they_are_is_not(root: Path, row: tuple[str, str, list[str], str]) -> None:
    stage, family, both, change = row
    assert identity(root, stage, family, *both) == identity(root, stage, family, *both, change)


def test_guidances_that_are_inputs_have_a_fingerprint_each(tmp_path: Path) -> None:
    for family in families(lambda spec: spec.guidance == "input"):
        scales = [f"model.guidance_scale={scale}" for scale in (0, 0.5, 1, 1.5)]
        assert len({identity(tmp_path, "rollout", family, scale) for scale in scales}) == 4


def test_every_backend_of_diffusers_is_known_and_only_quantized_ones_are_named() -> None:
    assert set(BACKENDS) == {backend.value for backend in AttentionBackendName}
    named = {name for name in BACKENDS if attention_identity(name) == name}
    assert named == {name for name in BACKENDS if "sage" in name}
    assert {attention_identity(name) for name in set(BACKENDS) - named} | {attention_identity(None)} == {"exact"}


def test_presets_keep_the_artifacts_of_earlier_versions(tmp_path: Path) -> None:
    """A setting, default or option that moves them makes every stored run stale."""
    pinned = json.loads(PINS.read_text())
    assert list(pinned) == [*PRESETS, FIT]
    moved = "\n".join(changed(pinned, tmp_path))
    assert not moved, (
        f"Artifacts have other ids, so stored runs would be made again:\n{moved}\n"
        "A new setting is Annotated[..., Later()]; one that changes no result is excluded from its stage's options(). "
        "If the output has another meaning, raise the stage's version in tasks/specs/stages.py. Where that is meant, "
        "or the preset itself was changed, write the ids anew: python -m tests.support.pins"
    )


WINDOW = "rollout.plan={{name: window, options: {{size: 2, mode: {}, stride: {}}}}}"


@pytest.mark.parametrize(
    ("plan", "others", "named"),
    [
        # 8 steps have 6 starts of windows of 2. Earlier versions had the starts 0, 4, 2, 0 and now 0, 4, 0, 4.
        (WINDOW.format("progressive", 4), [], {3: "starts_at_low", 4: "starts_at_low"}),
        (WINDOW.format("progressive", 2), [], {}),
        (WINDOW.format("random", 4), [], {}),
        ("rollout.plan={name: branch, options: {branches: 2, steps: [1]}}", [], dict.fromkeys(range(1, 5), "by_trunk")),
        ("rollout.plan={name: branch, options: {branches: 1, steps: [1]}}", [], {}),
        ("rollout.plan=branch", ["rollout.prompts_per_epoch=1", "rollout.group_size=1"], {}),
        ("rollout.plan=tests.tasks.runs.unknown:Plan", [], {}),
    ],
)
def test_rollouts_that_earlier_versions_drew_or_ordered_otherwise_have_another_name(
    plan: str, others: list[str], named: dict[int, str]
) -> None:
    config = load_config(ROOT / "configs" / "digits.yaml", ["rollout.steps=8", plan, *others])
    spec = RunPlan(config).modality_spec
    found = {epoch: spec.redrawn_options(RunPlan(config), epoch) for epoch in range(1, 5)}
    assert found == {epoch: {named[epoch]: True} if epoch in named else {} for epoch in range(1, 5)}


# What was really computed.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a family's tiny pipeline."""
    quiet_libraries()
    root = tmp_path_factory.mktemp("fingerprints")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            build_tiny(family).save_pretrained(root / family)
        return root / family

    return folder


def load(folder: Path, family: str, options: dict[str, Any] | None = None, **settings: Any) -> DiffusionPolicy:
    given = {"height": 32, "width": 32, **settings}
    lengths: dict[str, dict[str, Any]] = {
        "qwen_image_edit": {"max_sequence_length": 128, "condition_area": 4096},
        "qwen_image_edit_plus": {"max_sequence_length": 384, "reference_area": 4096},
        "sd15": {},
        "sdxl": {},
    }
    known = {**lengths.get(family, {"max_sequence_length": 16}), **(options or {})}
    policy: DiffusionPolicy = resolve(POLICIES, family, label="policy").load(
        folder, DiffusionSettings(**given), frozenset(Part), known
    )
    return policy


def images(policy: DiffusionPolicy) -> np.ndarray:
    noise = [torch.Generator().manual_seed(row) for row in range(2)]
    rollout = sample(
        policy,
        Conditioning(policy.encode(["a red cube", "a sign"])),
        policy.initial_latents(noise),
        policy.sigmas(3),
        sampler=Sampler(kernel=ODE(), solver=Euler()),
        plans=[ode_plan()] * 2,
        noise=lambda step: torch.zeros(0),
    )
    return np.asarray(rollout.final)


def test_flux_makes_other_images_at_every_guidance(folders: Callable[[str], Path]) -> None:
    made = [images(load(folders("flux1"), "flux1", guidance_scale=scale)) for scale in (0.0, 0.5, 1.0)]
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert np.abs(made[first] - made[second]).max() > 1e-4


def test_exact_backends_differ_by_rounding_and_the_default_is_native(folders: Callable[[str], Path]) -> None:
    default, native, other = (
        images(load(folders("flux1"), "flux1", attention=name)) for name in (None, "native", "_native_math")
    )
    np.testing.assert_array_equal(default, native)
    np.testing.assert_allclose(default, other, atol=1e-4)


def encoded(policy: DiffusionPolicy, family: str) -> dict[str, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    rows = policy.encode(["a red cube"], [[pixels]] if spec_of(family).starts_from != "text" else None)
    return {name: value.float().numpy() for name, value in rows.items()}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "settings", "same"),
    [
        ("sd3", {"options": {"schedule": "linear"}}, True),
        ("sd3", {"height": 64}, True),
        ("sd3", {"options": {"max_sequence_length": 8}}, False),
        ("sd15", {"options": {"steps": 4}}, True),
        ("wan22", {"options": {"guidance_scale_2": 3.0, "flow_shift": 2.0}}, True),
        ("wan22", {"frames": 9}, True),
        ("flux1", {"guidance_scale": 0.5}, True),
        ("flux1_kontext", {"height": 64}, False),
        ("flux1_kontext", {"width": 64}, False),
        ("qwen_image_edit", {"width": 64}, False),
        ("qwen_image_edit_plus", {"options": {"references": 2}}, False),
        ("qwen_image_edit_plus", {"options": {"reference_area": 9216}}, False),
        ("wan22_i2v", {"frames": 9}, False),
        ("wan22_i2v", {"height": 64}, False),
    ],
    ids=str,
)
def test_embeddings_depend_on_what_their_fingerprint_holds(
    folders: Callable[[str], Path], family: str, settings: dict[str, Any], same: bool
) -> None:
    frames = {"frames": 5} if spec_of(family).clips else {}
    one = encoded(load(folders(family), family, **frames), family)
    other = encoded(load(folders(family), family, **{**frames, **settings}), family)
    assert equal(one, other) == same


def test_guidance_up_to_one_is_off(make_config: Make, tmp_path: Path) -> None:
    digests, artifacts = [], []
    for scale in (0, 0.5, 1):
        context = prepare(make_config(f"store.root={tmp_path / str(scale)}", f"model.guidance_scale={scale}"))
        run_stage(context, "rollout", 1)
        ref = context.chain.require(1, "rollout").ref
        artifacts.append(str(ref))
        digests.append(context.store.require(ref).digest)
    assert len(set(artifacts)) == len(set(digests)) == 1


def test_options_left_out_of_embeddings_are_options_of_their_family() -> None:
    for family in families(lambda spec: spec.not_encoded):
        options = resolve(POLICIES, family, label="policy").options_type
        assert spec_of(family).not_encoded <= {field.name for field in dataclasses.fields(options)}


def test_noise_ranges_are_those_of_the_family(folders: Callable[[str], Path]) -> None:
    for family in families(lambda spec: spec.noise_range):
        first, last = spec_of(family).noise_range or (1, 0)
        sigmas = load(folders(family), family).sigmas(50).tolist()
        assert sigmas[0] == pytest.approx(first, abs=2e-3)
        assert sigmas[-1] == pytest.approx(last, abs=1e-4)


@pytest.mark.parametrize(("algorithm", "ends"), [("grpo", False), ("nft", True), ("refl", True), ("fdfo", True)])
def test_training_on_ends_has_another_name_where_chains_end_above_level_0(algorithm: str, ends: bool) -> None:
    """Earlier versions trained on final latents of Stable Diffusion that were shorter than those that were scored."""
    for family in ("sd15", "sdxl", "sd3", "cogvideox"):
        config = load_config(ROOT / "configs" / f"tiny_{family}.yaml", [f"optimize.algorithm={{name: {algorithm}}}"])
        options = DiffusionSpec().training_options(RunPlan(config))
        assert options.get("ends") == ("clean" if ends and spec_of(family).noise_range else None)
