"""Single files in the layouts of models' authors, against the folders they were written from and diffusers itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusionPipeline
from safetensors.torch import load_file
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import resolve
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Sampler, ode_plan, sample
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE
from flowmill.models.policies import POLICIES
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import PipelinePolicy
from flowmill.models.quickstart.tiny import build_tiny
from tests.support.single_files import (
    sd3_transformer,
    single_file,
    stable_diffusion,
    stable_diffusion_3,
    stable_diffusion_xl,
    state,
)

WHOLE = {"sd15": stable_diffusion, "sdxl": stable_diffusion_xl, "sd3": stable_diffusion_3}


class Saved(NamedTuple):
    """A pipeline and its folder."""

    pipeline: Any
    folder: Path


Make = Callable[[str], Saved]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a family's; of Stable Diffusion 3 the first text encoder does not project, as in single files."""

    @cache
    def make(family: str) -> Saved:
        quiet_libraries()
        pipeline = build_tiny(family)
        if family != "sd15":
            # diffusers tells text encoders of one file apart by their widths.
            config = pipeline.text_encoder_2.config
            wider = type(config)(**{**config.to_dict(), "hidden_size": 48, "projection_dim": 48})
            pipeline.text_encoder_2 = type(pipeline.text_encoder_2)(wider)
        if family == "sd3":
            pipeline.text_encoder.text_projection.weight.data = torch.eye(32)
        folder = tmp_path_factory.mktemp("saved") / family
        pipeline.save_pretrained(folder)
        return Saved(pipeline, folder)

    return make


def without_weights(folder: Path, target: Path) -> Path:
    """Return a copy of a folder that has configs and tokenizers alone."""
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors")))


def policy_of(family: str) -> type[PipelinePolicy]:
    found: type[PipelinePolicy] = resolve(POLICIES, family, label="model.policy")
    return found


def ode(family: str, folder: Path) -> Tensor:
    """Return the images of two prompts."""
    steps, settings = 3, DiffusionSettings(height=64, width=64, guidance_scale=3.0)
    options = {} if family == "sd3" else {"steps": steps}
    policy: Any = policy_of(family).load(folder, settings, frozenset(Part), options)
    cond = Conditioning(policy.encode(["a red cube", "two cats"]), policy.encode(["", ""]))
    sigmas, start = policy.sigmas(steps), policy.initial_latents([torch.Generator().manual_seed(row) for row in (0, 1)])
    sampler = Sampler(kernel=ODE(), solver=Euler())
    made = sample(policy, cond, start, sigmas, sampler=sampler, plans=[ode_plan()] * 2, noise=lambda *_: start).final
    return policy.decode(policy.finished(made, cond))  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", WHOLE)
def test_a_whole_file_and_configs_are_the_folder_bit_for_bit(family: str, saved: Make, tmp_path: Path) -> None:
    pipeline, folder = saved(family)
    configs = without_weights(folder, tmp_path / "configs")
    file = single_file(WHOLE[family](pipeline), tmp_path / "model.safetensors")
    made = policy_of(family)
    held = made.check_single_files({"": str(file)}, configs)
    texts = {name for name in ("text_encoder", "text_encoder_2", "text_encoder_3") if hasattr(pipeline, name)}
    assert held == {*texts, "vae", made.denoiser_names[0]}
    made.write_single_files({"": str(file)}, configs, tmp_path / "made")
    for path in folder.rglob("*.*"):
        if path.name != "model_index.json":
            assert (tmp_path / "made" / path.relative_to(folder)).read_bytes() == path.read_bytes(), path
    if family == "sd15":
        assert torch.equal(ode(family, tmp_path / "made"), ode(family, folder))


@pytest.mark.parametrize("family", ["sd15", "sd3"])
def test_diffusers_own_call_gives_the_same_weights(family: str, saved: Make, tmp_path: Path) -> None:
    pipeline, folder = saved(family)
    configs = without_weights(folder, tmp_path / "configs")
    file, options = tmp_path / "model.safetensors", {"config": str(configs), "local_files_only": True}
    policy = policy_of(family)
    if family == "sd15":
        single_file(stable_diffusion(pipeline), file)
        theirs: Any = StableDiffusionPipeline.from_single_file(str(file), **options)
        compared = {name: getattr(theirs, name) for name in ("unet", "vae", "text_encoder")}
    else:
        # The transformer alone: of text encoders it would take the first for the second, which is as wide here.
        single_file(sd3_transformer(state(pipeline.transformer)), file)
        alone = SD3Transformer2DModel.from_single_file(str(file), subfolder="transformer", **options)
        compared = {"transformer": alone}
    policy.write_single_files({"": str(file)}, folder, tmp_path / "made")
    for name, module in compared.items():
        (stored,) = (tmp_path / "made" / name).glob("*.safetensors")
        ours, given = load_file(stored), module.state_dict()
        assert ours.keys() == given.keys()
        assert all(torch.equal(ours[key], given[key]) for key in ours)


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Q = "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight"
POS = "model.diffusion_model.pos_embed"


def without(name: str) -> Change:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: {**tensors, name: change(tensors[name])}


REFUSED = {
    "another": (lambda _: stable_diffusion(build_tiny("sd15")), "is no SD3Transformer2DModel as transformer"),
    "deeper": (
        lambda t: {**t, "first_stage_model.encoder.down.0.block.5.conv1.bias": torch.ones(8)},
        r"has \d+ values, of which its components take \d+",
    ),
    "missing": (without(POS), "is no SD3Transformer2DModel as transformer .it has no 'pos_embed'"),
    "part missing": (
        without("first_stage_model.decoder.conv_in.bias"),
        "is no AutoencoderKL as vae .it lacks weights",
    ),
    "another size": (
        changed(POS, lambda tensor: tensor[:, :-1]),
        r"pos_embed.pos_embed expected shape .*1, 1024, 32.*, but got .*1, 1023, 32",
    ),
    "another rank": (
        changed(Q, lambda tensor: tensor[0, 0]),
        rf"has '{Q}' of shape \(\), where weights have a dimension or more",
    ),
    "another tensor": (
        lambda t: {**t, "model.diffusion_model.more": torch.ones(1)},
        r"has \d+ values, of which its components take \d+",
    ),
    "another part": (lambda t: {**t, "vocoder.x": torch.ones(1)}, r"has \d+ values, of which its components take \d+"),
    "rounded": (
        changed(Q, lambda tensor: tensor.to(torch.float8_e4m3fn)),
        "float8_e4m3fn, which is rounded for speed",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_another_model_or_not_all_of_it_is_refused_by_name(
    saved: Make, tmp_path: Path, change: Change, message: str
) -> None:
    pipeline, folder = saved("sd3")
    file = single_file(change(stable_diffusion_3(pipeline)), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"model.single_file: '.*model.safetensors' .*({message}).*no run can start"):
        policy_of("sd3").check_single_files({"": str(file)}, folder)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.ckpt", lambda path: None, "is pickled and can run any code.*save_file"),
        ("model.gguf", lambda path: None, "is no safetensors file.*relative to the config file"),
        ("model.safetensors", Path.unlink, "is no safetensors file"),
        ("model.safetensors", _cut, "cannot be read.*Copy or download it again"),
    ],
)
def test_files_of_another_kind_are_refused(
    saved: Make, tmp_path: Path, name: str, change: Callable[[Path], None], message: str
) -> None:
    file = single_file(sd3_transformer(state(saved("sd3").pipeline.transformer)), tmp_path / name)
    change(file)
    with pytest.raises(ConfigError, match=f"model.single_file: .*{message}"):
        policy_of("sd3").check_single_files({"": str(file)}, None)


def test_a_file_of_the_transformer_alone_needs_all_else_in_the_folder(saved: Make, tmp_path: Path) -> None:
    pipeline, folder = saved("sd3")
    configs = without_weights(folder, tmp_path / "configs")
    files = {"": str(single_file(sd3_transformer(state(pipeline.transformer)), tmp_path / "alone.safetensors"))}
    assert policy_of("sd3").check_single_files(files, folder) == {"transformer"}
    with pytest.raises(
        ConfigError, match=r"has no weights of text_encoder .*model\.single_file holds only transformer"
    ):
        policy_of("sd3").check_single_files(files, configs)


def test_a_component_can_be_taken_of_a_file_with_more(saved: Make, tmp_path: Path) -> None:
    pipeline, folder = saved("sd3")
    twice = {name: 2 * tensor for name, tensor in stable_diffusion_3(pipeline).items()}
    file = single_file({**twice, "vocoder.x": torch.ones(1)}, tmp_path / "more.safetensors")
    policy_of("sd3").write_single_files({"vae": str(file)}, folder, tmp_path / "made")
    for name, factor in (("vae", 2), ("transformer", 1)):
        weights = f"{name}/diffusion_pytorch_model.safetensors"
        ours, own = load_file(tmp_path / "made" / weights), load_file(folder / weights)
        assert all(torch.equal(ours[key], factor * own[key]) for key in own)
    with pytest.raises(ConfigError, match=r"is for transformer_2, which model.path .* lacks"):
        policy_of("sd3").check_single_files({"transformer_2": str(file)}, folder)


def test_of_two_denoisers_it_is_said_which_one_a_file_is_of(tmp_path: Path) -> None:
    pipeline, folder = build_tiny("wan22"), tmp_path / "wan"
    pipeline.save_pretrained(folder)
    other = {name: 2 * tensor for name, tensor in state(pipeline.transformer).items()}
    file = str(single_file(other, tmp_path / "low.safetensors"))
    family = policy_of("wan22")
    with pytest.raises(
        ConfigError, match=r"Say which one: model\.single_file={transformer: FILE, transformer_2: FILE}"
    ):
        family.check_single_files({"": file}, folder)
    # Names as diffusers has them are known too.
    family.write_single_files({"transformer_2": file}, folder, tmp_path / "made")
    for name, wanted in (("transformer", state(pipeline.transformer)), ("transformer_2", other)):
        found = load_file(tmp_path / "made" / name / "diffusion_pytorch_model.safetensors")
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
