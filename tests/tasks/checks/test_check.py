from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowmill.configs.errors import ConfigError, FlowmillError, PromptError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.maths.schedules import Steps
from flowmill.models.policies.attention import FIXED
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.checks.idle_time import idle_notes, idle_shares
from flowmill.tasks.checks.notes import padding_notes, training_notes
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.specs.plan import RunPlan
from tests.conftest import ROOT
from tests.support.inside import Make, prepare
from tests.support.language_models import drawn_texts_data, texts_data
from tests.support.unified_models import unified_data
from tests.support.vision_classes import vision_data


def test_cost_by_hand(make_config: Make) -> None:
    cost = check_config(make_config())
    # 4 groups of 4, 3 steps, 2 of them trained, 3 states of 4 x 8 x 16 float32 values.
    assert cost.samples_per_epoch == 16
    assert cost.rollout_forwards == 16 * 3
    assert cost.optimize_rows == 16 * 2
    assert cost.latent_bytes_per_epoch == 16 * 3 * (4 * 8 * 16) * 4
    assert cost.updates == 2 * 2
    assert cost.shards_per_epoch == 2
    assert cost.evaluate_forwards == 2 * 4 * 3
    assert cost.evaluations == 3
    assert cost.prompts == {"train": 8, "heldout": 3, "negative": 0}


def test_guidance_doubles_the_rows_and_needs_the_negative_prompt(make_config: Make) -> None:
    cost = check_config(make_config("model.guidance_scale=4.5"))
    assert cost.rollout_forwards == 2 * 16 * 3
    assert cost.prompts["negative"] == 1


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            ["optimize.algorithm={name: grpo, options: {kl: velocity, kl_coef: 0}}"],
            "kl_reference belong to kl_coef",
        ),
        (["optimize.algorithm={name: awm, options: {power: 0.5}}", "rollout.plan=final"], "power belongs to weighting"),
        (
            ["rollout.plan={name: window, options: {stride: 3}}"],
            "plan 'window': stride and epochs_per_shift",
        ),
        (
            ["advantage.std=none", "advantage.unbiased=true"],
            "unbiased is set, but advantage.std is 'none'",
        ),
        (["advantage.buffer=4"], "buffer is set, but advantage.std is 'group'"),
        (["advantage={mode: best_worst, best_of: 2}"], "best_of is set, but advantage.mode is 'best_worst'"),
    ],
)
def test_what_an_ablation_switches_off_is_noted(make_config: Make, changed: list[str], expected: str) -> None:
    config = make_config(*changed)
    check_config(config, rewards=False)
    (note,) = training_notes(RunPlan(config), updates=4)
    assert expected in note


@pytest.mark.parametrize(
    ("advantage", "algorithm"),
    [
        ("{std: global, mean: global}", "nft"),
        ("{std: running}", "nft"),
        ("{estimator: 'tests.tasks.checks.test_plug_ins:Signs'}", "dpo"),
        ("{}", "{name: nft, options: {kl_coef: 0.1}}"),
    ],
)
def test_equal_samples_are_allowed_where_they_are_trained_on(make_config: Make, advantage: str, algorithm: str) -> None:
    changed = (f"advantage={advantage}", f"optimize.algorithm={algorithm}", "rollout.same_noise=true")
    check_config(make_config("rollout.plan=final", *changed), rewards=False)


def test_a_run_that_has_begun_goes_on_with_settings_without_effect(make_config: Make) -> None:
    idle, refusal = "advantage={soft_clip: 3, clip: 2}", "advantage.clip is set"
    config = begin_run(make_config(idle)).config
    with pytest.raises(ConfigError, match=refusal):
        check_config(config)
    prepare(config)
    check_config(config)
    with pytest.raises(ConfigError, match=refusal):
        check_config(make_config(idle, "run.seed=7"))


def test_informative_groups_of_a_branching_plan_are_of_prompts_and_steps(make_config: Make) -> None:
    plan = "rollout.plan={name: branch, options: {branches: 4, steps: [0, 1, 2]}}"
    branch = ("optimize.algorithm=tempflow", plan, "rollout.group_size=1")
    groups = 3 * make_config(*branch).rollout.prompts_per_epoch
    check_config(make_config(*branch, f"advantage.informative={groups}"))
    with pytest.raises(ConfigError, match=rf"an epoch has {groups} groups"):
        check_config(make_config(*branch, f"advantage.informative={groups + 1}"))


def test_a_loss_without_guidance_takes_half_the_forwards(make_config: Make) -> None:
    options = ["rollout.plan={name: final}", "optimize.algorithm={name: dgpo, options: {guided: false}}"]
    cost = check_config(make_config("model.guidance_scale=4.5", *options))
    assert cost.rollout_forwards == 2 * 16 * 3
    assert cost.optimize_forwards == cost.reference_forwards == cost.optimize_rows == 16 * 4
    with pytest.raises(ConfigError, match=r"none that could be left out: model.guidance_scale is 1, .* Remove the"):
        check_config(make_config(*options))


def test_a_run_of_no_epochs_has_a_cost(make_config: Make) -> None:
    config = make_config("run.epochs=0")
    cost = check_config(config)
    assert cost.updates == 0
    assert not any(note.startswith("optimize") for note in padding_notes(config, cost))


def test_heldout_prompts_must_not_be_trained_on(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "heldout.txt").write_text('"91"\n"03"\n')
    with pytest.raises(PromptError, match=r"1 prompts are in prompts\.train too, the first is '\"03\"'"):
        check_config(make_config())


#: Bases of a language model, of images and of what the fixture ``changed`` writes.
WRITTEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "texts": texts_data,
    "vision": vision_data,
    "unified": unified_data,
}
GRADIENT = "small; optimize.algorithm=reward_gradient; rollout.plan=final; rewards=[{name: digits_network}]"
SERVED = "small; rollout.engine={name: sglang, options: {servers: ['http://127.0.0.1:1']}}"
TURNED = "drawn; render.turns={count: 3, comment: '{score}', comment_tokens: 2, done: '7'}"
#: Of the small run, of what is written and of tiny presets, each with settings: changes, separated by semicolons, and
#: what is said of them. Refusals of combinations alone are in test_rules.py.
REFUSED = {
    "small": """
        rollout.steps=1 -> trains none. Raise rollout.steps
        rollout.prompts_per_epoch=9 -> prompts.train holds 8 prompts
        model.kind=tokens -> model.kind is 'tokens', but model.policy 'sd3' is of the kind 'diffusion'. Remove it
        model.policy=sd4 -> model.policy 'sd4' does not exist. Did you mean 'sd3'
        rewards.0.name=jpeg_compresibility -> Did you mean 'jpeg_compressibility'
        optimize.algorithm.name=gpro -> Did you mean 'grpo'
        rollout.sampler.name=flow_sd -> Did you mean 'flow_sde'
        rollout.store=webdatset -> Did you mean 'webdataset'
        rollout.plan={name: window, options: {size: 5}} -> does not fit into
        evaluate.solver=dpm3 -> Did you mean 'dpm2'
        rollout.plan.options.last=never -> must be 'ode', 'sde' or 'train'
        rollout.sampler.options.noise=1 -> has no option 'noise'. Did you mean 'noise_level'
        optimize.algorithm.options.clip_range=0 -> clip_range is 0; it must be greater than 0
        optimize.algorithm.options.kl=gauss -> must be 'gaussian'
        evaluate.judges=[{name: jpeg_compressibility}] -> appears 2 times. Give each its own 'label'
        rewards.0.name=nowhere:Reward -> module 'nowhere' cannot be imported
        rewards.0.name=math:pi -> it must be a class with score or a function, like
        model.path=./nowhere -> is no folder
        rollout.plan={name: al} -> rollout.plan 'al' does not exist. Did you mean 'all'
        rollout.plan.options.lst=train -> rollout.plan 'all' has no option 'lst'. Did you mean 'last'
        rollout.sampler={name: cps, options: {log_probs: squared}} -> Did you mean 'log_prob'
        optimize.algorithm.options.clip_rang=1 -> Did you mean 'clip_range'
        model.frames=5 -> model.frames is 5, but model.policy 'sd3' makes images. Set it to 1
        rollout.media.format=mp4 -> 'mp4', but model.policy 'sd3' makes images, which that cannot hold
        rewards.0.frames=clip -> 'frames' of 'jpeg_compressibility' is 'clip', but model.policy 'sd3' makes images
        model.attention=flash -> model.policy 'sd3' calls torch's attention directly, so it would never be used
        model.attention=nativ -> model.attention 'nativ' does not exist. Did you mean 'native'
        optimize.algorithm=crd; rollout.plan=final; execution.micro_batch_size=3 -> micro_batch_size to 4 or more
        optimize.algorithm=crd; rollout.plan={name: branch, options: {branches: 6, steps: [2]}} -> here of 24 samples
        rollout.sampler={name: ddim, options: {eta: 1e-9}} -> (std 6.7e-10), and a step without noise has no log
        rollout.plan={name: 'tests.tasks.checks.test_check:Twice'} -> trains the steps [1, 1], but a sample passes
        rollout.plan={name: 'tests.tasks.checks.test_check:Uneven'} -> trains more steps of some groups than of others
        model.width=512 -> model.width is 512, but
        evaluate.height=20 -> evaluate.height is 20, but this model takes multiples of
        evaluate.width=48 -> has positions for 32 pixels at most
        evaluate.frames=5 -> evaluate.frames is 5 and model.frames is 1: one makes images
        rewards=["tests.tasks.stages.test_scoring:Latent"] -> scores latents, which are not kept
        rollout.media={format: none, latents: true} -> but rollout.media.format is 'none' and nothing is decoded
        rewards=["tests.tasks.stages.test_scoring:OfClips"] -> scores whole clips, but its 'frames' is 1
        rewards=["tests.tasks.stages.test_scoring:Columned"] -> needs the column 'count'
        rewards=[{name: digits, server: 'http://x', device: cpu}] -> has the device 'cpu' and a server
        evaluate.judges=[{name: digits, threshold: 1}] -> evaluate.judges: 'digits' has threshold 1.0
        monitors=[{name: digits, standardize: true}] -> monitors: 'digits' has standardize True
        optimize.algorithm=refl; rollout.plan={name: late, options: {count: 9}} -> 9 states cannot be drawn
        advantage.soft_clip=0 -> advantage.soft_clip
        advantage.soft_clip=3; advantage.clip=2 -> advantage.clip is set, but advantage.soft_clip is 3.0, so
        optimize.algorithm={name: dpo, options: {times: {shared: false}}}; rollout.plan=final -> shared of times is Fa
        rollout.plan={name: window, options: {mode: progressive, stride: 9}} -> so it never moves
        rollout.plan=final; optimize.algorithm=nft; rollout.same_noise=true -> all samples of a group would be equal
        advantage={std: running}; rollout.plan=final; optimize.algorithm=dpo; rollout.same_noise=true -> would be equal
        advantage.best_of=3 -> multiple of 2
        prompts.sampler=dificulty -> Did you mean 'difficulty'
        prompts.sampler=difficulty -> it needs either 'target', a mean reward, or 'epochs'
        prompts.sampler={name: informative, options: {time: 3}} -> Did you mean 'times'
        prompts.sampler=sources -> sets the shares of prompts.sources, but there is one list
        prompts.sampler=math:pi -> it must be a class with choose
        execution.runner=dusk -> execution.runner 'dusk' does not exist. Did you mean 'dask'?
        execution.runner={name: dask, options: {workers: 0}} -> workers is 0; it must be greater than 0
        execution.runner={name: dask, options: {address: 'tcp://n:1', cluster_class: x.Y}} -> names a cluster that runs
        execution.runner={name: dask, options: {address: 'tcp://n:1', workers: 4}} -> workers are started on this
        execution.runner={name: dask, options: {cluster_class: x.Y, workers: 2}} -> workers are started on this
        execution.runner=dask; execution.score_workers=2 -> execution.score_workers is 2
        execution.runner=ray -> 'address'
        execution.runner={name: ray, options: {address: auto}} -> address is 'auto', which has no port
        watch.on.kll=stop -> there is no rule 'kll'. Did you mean 'kl'
        watch.on.kl=pause -> must be 'warn' or 'stop'
        watch.on.kl=back -> the action 'back', which rule 'kl' has, no longer exists. Set the rule to
        watch.rate=0.2 -> setting 'watch.rate' no longer exists.
        optimize.stop_kl=0 -> 'optimize.stop_kl' is 0
        optimize.schedule={name: cosine} -> falls until total_updates, which is None
        optimize.schedule={name: linear, total_updates: 5, warmup_updates: 5} -> Set total_updates above it
        optimize.schedule={total_updates: 5} -> schedule 'constant' never falls
        optimize.schedule={final: 0.5} -> schedule 'constant' never falls
    """,
    "small; execution.nodes=2; execution.launcher={name: agents, options: {endpoint: 'n:1', prefixes: [[a], [b]]}}": """
        execution.launcher=local -> execution.launcher 'local' starts processes on this machine alone
        execution.launcher.options.endpoint=node1 -> Write it as 'host:port'
        execution.launcher.options.prefixes=[] -> Give one list of words per process
        execution.launcher=slurm -> execution.launcher 'slurm' does not exist
    """,
    GRADIENT: """
        rewards=[digits] -> 'digits' has no gradient
        rewards=[{name: image_similarity, options: {by: pixels, folder: x}}] -> has no gradient with options
        rewards=["tests.tasks.stages.test_gradient:Groupwise"] -> compares samples
        rewards.0.threshold=0.5 -> has threshold set
        rewards.0.standardize=true -> has standardize set
        rewards.0.server=http://127.0.0.1:1 -> has server set
    """,
    "flux1_kontext": """
        prompts.image=null -> 'flux1_kontext' starts from images, but prompts.image is not set
        model.policy=flux1 -> prompts.image is 'image', but model.policy 'flux1' takes no image
        evaluate.height=128 -> evaluate: height, width and frames are set, but prompts of
    """,
    "edit_sft": """
        prompts.train=here.txt -> do not go with 'data'
        data.windows=3 -> data.windows is the number of random crops
        data.repeats=0 -> data.repeats is 0; a row counts once or more
        data.empty_captions=1.0 -> empty_captions
    """,
    "sd15": """
        model.options={} -> rollout.steps is 4, but model.options.steps of model.policy 'sd15' is 50
        model.guidance_scale=1; model.options={steps: 4, guidance_rescale: 0.7} -> so there is nothing to rescale
        model.options={steps: 4, guidance_rescale: 2} -> is 2; it must be less than or equal to 1
        evaluate.steps=9 -> evaluate.steps is 9, but model.options.steps of model.policy 'sd15' is 4
        rollout.plan=final; optimize.algorithm=nft -> to {low: 0.0283, high: 0.93}, or its kind to 'timesteps'
    """,
    "cogvideox": """
        model.frames=5 -> takes 8 n + 1 frames. The nearest are 1 and 9
        rollout.steps=3 -> is a multiple of their number. The nearest are 2 and 4
        evaluate.steps=30 -> evaluate.steps is 30, but the steps of model.policy
        rollout.plan=final; optimize.algorithm=nft -> knows levels from 0.0481 to 1.0 only
    """,
    "wan21": """
        rollout.media.format=webp -> 'webp', but model.policy 'wan21' makes clips
        model.options.guidance_scale_2=3 -> 'wan21' has no second transformer. Remove it
        monitors=[{name: loudness}] -> scores sounds, but samples of model.policy 'wan21' have none
    """,
    "wan22": """
        model.options.guidance_scale_2=3; model.guidance_scale=1 -> 1.0 switches guidance off for both
    """,
    "flux1": """
        model.negative_prompt=blurry -> which takes no negative prompt. Remove it
        model.attention=sage; model.dtype=bfloat16 -> it has no backward pass
        model.attention=flash -> bfloat16 and float16 only, and model.dtype is 'float32'
        model.attention=aiter_fa2_hub; model.dtype=float16 -> bfloat16 only, and model.dtype is 'float
        model.attention=flash; model.dtype=bfloat16; execution.device=cpu -> it trains on CUDA devices only
    """,
    "wan21_v2v": """
        model.options.strength=0 -> strength is 0; it must be greater than 0
    """,
    "wan22_ti2v_i2v": """
        optimize.algorithm=reward_gradient; rewards=[{name: digits}] -> are decoded with the image they
    """,
    "sana": """
        model.options.instruction=true; model.negative_prompt=blurry -> before negative prompts. Remove it, or set
        model.attention=_native_math -> 'sana' calls torch's attention directly
    """,
    "qwen_image21": """
        model.attention=_native_math -> 'qwen_image21' calls torch's attention directly
    """,
    "flux2": """
        model.options.references=-1 -> references is -1; it must be greater than or equal to 0
        model.options.references=two -> references is 'two'
        model.options.reference_area=9216 -> references is 0, so there are no images to scale
    """,
    "qwen_image": """
        model.guidance_scale=1; model.negative_prompt=blurry -> 1.0 switches guidance off. Remove it
        model.attention=_native_flash; model.dtype=bfloat16 -> it takes no mask, and the padded
    """,
    "ltx2": """
        rollout.media.fps=16 -> makes 24.0 frames for a second of sound (model.options.frame_rate)
        model.guidance_scale=1; model.options.audio_guidance_scale=7 -> 1.0 switches guidance off, for sound too
    """,
    "z_image": """
        model.dtype=float16 -> exceed its range, so that latents become NaN. Set it to 'bfloat16'
    """,
    "texts": """
        optimize.algorithm=nft -> optimize.algorithm 'nft' does not exist
        rewards=[{name: jpeg_compressibility}] -> scores images, but model.policy 'causal_lm' makes texts
        optimize.algorithm=ppo; advantage.estimator.options={decay: 2} -> decay is 2
        optimize.algorithm=ppo; critic.path=nowhere -> critic.path 'nowhere' is no folder
    """,
    "drawn": """
        rewards=[{name: lexicon}] -> 'lexicon' scores texts, but with a section 'render'
        rewards=[{name: jpeg_compressibility, reads: texts}, blockiness] -> scores images, but model.policy 'causal_lm'
        render.model.policy=flux1_kontext -> render: model.policy 'flux1_kontext' starts from images, but prompts.image
        render.model.height=15 -> render: model.height
        render=null; rewards=[{name: lexicon}] -> has reads 'texts'
    """,
    TURNED: """
        render.turns.comment_tokens=64 -> tokens, but the model takes 64
    """,
    "vision": """
        prompts.image=null -> prompts.image is not set
        rollout.tokens={template: none, max_new: 4} -> only the template of a processor says where images go
        model.options={images: 0} -> greater than or equal to 1
        model.policy=causal_lm; prompts.image=null -> needs a causal language model
        rollout.tokens.engine={name: openai, options: {endpoint: 'http://127.0.0.1:9', model: m}} -> reads no images
        model.options={train_vision: true}; execution={strategy: fsdp, processes: 2} -> train_vision
    """,
    "unified": """
        model.negative_prompt=blurry -> compares with a prompt without its tokens. Remove it
        model.width=32 -> model.width is 32, but an image of the model has 16 tokens, and 16 x 16 pixels
        rollout.tokens.max_new=8 -> rollout.tokens.max_new is 8, but an image
        optimize.shared_prompts=true -> optimize.shared_prompts is true, which model.policy 'janus'
        rewards=[{name: exact_text}] -> scores texts
        execution={strategy: fsdp, processes: 2} -> fsdp
    """,
    SERVED: """
        rollout.latents_dtype=float16 -> rounds the latents between steps
        rollout.plan=branch -> branches, and a request is for one chain
        rollout.engine.options.servers=[] -> servers is []
        rollout.engine.options.servers=['host:1'] -> begin with http://
        rollout.engine=vllm -> rollout.engine 'vllm' does not exist
        execution={strategy: fsdp, processes: 2, sampling: spread, device: cpu} -> 'whole'
        rollout.sampler=dance_sde -> rollout.engine is 'sglang', but it has no
        rollout.same_noise=true -> rollout.engine is 'sglang', but it draws
    """,
}
Changed = Callable[..., RunConfig]


@pytest.fixture
def changed(make_config: Make, tiny_base: Path, tmp_path: Path) -> Changed:
    """Returns the config of a base with settings of its own, and with changes."""

    def make(base: str, *changes: str) -> RunConfig:
        name, *settings = base.split("; ")
        if name == "small":
            return make_config(*settings, *changes)
        if name not in (*WRITTEN, "drawn"):
            return load_config(f"tiny_{name}", [*settings, *changes])
        data = drawn_texts_data(tmp_path, tiny_base) if name == "drawn" else WRITTEN[name](tmp_path)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
        return load_config(tmp_path / f"{name}.yaml", [*settings, *changes])

    return make


@pytest.mark.parametrize(
    ("base", "change", "expected"),
    [(base, *line.strip().split(" -> ")) for base, text in REFUSED.items() for line in text.strip().splitlines()],
)
def test_what_cannot_work_is_refused(changed: Changed, base: str, change: str, expected: str) -> None:
    with pytest.raises(FlowmillError) as error:
        check_config(changed(base, *change.split("; ")))
    assert expected in str(error.value)


@pytest.mark.parametrize("base", REFUSED)
def test_what_is_changed_works_as_it_is(changed: Changed, base: str) -> None:
    check_config(changed(base))


class Twice:
    """A plan that repeats a step."""

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        return Steps(stochastic=(1,), trained=(1, 1))


class Uneven:
    """A plan that gives groups different numbers of steps."""

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        chosen = tuple(range(1 + seed % 2))
        return Steps(stochastic=chosen, trained=chosen)


def test_branches_count_as_samples_of_a_group(make_config: Make) -> None:
    branch = "rollout.plan={name: branch, options: {branches: 2}}"
    assert check_config(make_config("rollout.group_size=1", branch)).samples_per_epoch == 4 * 2 * 2
    with pytest.raises(ConfigError, match="all advantages would be 0"):
        check_config(make_config("rollout.group_size=1", branch, "rollout.plan.options.branches=1"))


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("model_index.json", b"{", "is not a whole pipeline: '.*model_index.json' is no JSON"),
        ("transformer/config.json", b"\xff", "is not a whole pipeline: '.*config.json' is no JSON"),
        ("transformer/config.json", None, r"is not a whole pipeline: .*No such file.*config.json"),
        ("text_encoder/model.safetensors", b"short", "text_encoder' cannot be loaded: .*header too small"),
    ],
)
def test_a_broken_model_folder(
    make_config: Make, tmp_path: Path, file: str, content: bytes | None, expected: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(str(make_config().model.path), folder)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        check_config(make_config(f"model.path={folder}"))


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("scheduler", {"set_alpha_to_one": True}, "has no noise there (std 0.0e+00), and a step without noise"),
        ("scheduler", {"timestep_spacing": "linspace"}, "timestep_spacing of its scheduler DDIMScheduler is"),
        ("scheduler", {"timestep_spacing": "trailing", "num_train_timesteps": 999}, "only where 999 is a multiple"),
        ("scheduler", {"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr with prediction_type 'epsilon'"),
        ("unet", {"time_cond_proj_dim": 8}, "takes guidance as an input (time_cond_proj_dim)"),
    ],
)
def test_check_reads_the_schedule_of_a_folder(file: str, change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    build_tiny("sd15").save_pretrained(tmp_path)
    (path,) = (tmp_path / file).glob("*config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    config = load_config(ROOT / "configs" / "tiny_sd15.yaml", ["model.build=null", f"model.path={tmp_path}"])
    with pytest.raises(ConfigError) as error:
        check_config(config)
    assert expected in str(error.value)


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_a_scale_is_refused_for_a_model_without_an_input_of_guidance(family: str, tmp_path: Path) -> None:
    build_tiny(family, changes={"transformer": {"guidance_embeds": False}}).save_pretrained(tmp_path)
    settings = ["model.build=null", f"model.path={tmp_path}"]
    check_config(load_config(f"tiny_{family}", [*settings, "model.guidance_scale=1"]))
    with pytest.raises(ConfigError, match=r"guidance_scale is 3\.5, but .* has no input for it \(guidance_embeds"):
        check_config(load_config(f"tiny_{family}", [*settings, "model.guidance_scale=3.5"]))


def test_attention_backends_are_never_used_by_the_families_said_to_ignore_them() -> None:
    quiet_libraries()
    for family in ("sd3", "sd15", "flux1", "qwen_image", "z_image", "wan21"):
        pipeline = build_tiny(family)
        module = pipeline.unet if family == "sd15" else pipeline.transformer
        takes = {
            hasattr(layer.processor, "_attention_backend") for layer in module.modules() if hasattr(layer, "processor")
        }
        assert takes == {family not in FIXED}


def test_idle_shares_by_hand(make_config: Make) -> None:
    """4 groups of 4 and two lists of 4 on 8 processes, in batches of 2 and micro-batches of 16."""
    settings = ("execution.processes=8", "execution.rollout_batch_size=2", "execution.device=cpu")
    config = make_config(*settings)
    cost = check_config(config, rewards=False)
    found = {idle.stage: (idle.parts, idle.share) for idle in idle_shares(RunPlan(config), cost)}
    # 11 prompts in one shard: one of 8 works, its second batch of 8 on 3 rows.
    assert found["encode"] == (1, 1 - 11 / 8 / 16)
    assert found["rollout"] == (8, 0.0)
    assert found["optimize"] == (1, 0.875)
    assert found["evaluate"] == (4, 0.5)
    assert found.keys() & {"score", "judge"} == set(), "the reward takes no accelerator"
    agents = "execution.launcher={name: agents, options: {endpoint: 'n:1', prefixes: [[a], [b]]}}"
    nodes = make_config("execution.nodes=2", agents, "execution.processes=4", *settings[1:])
    found = {idle.stage: (idle.parts, idle.share) for idle in idle_shares(RunPlan(nodes), cost)}
    assert (found["score"], found["judge"]) == ((8, 0.0), (4, 0.5)), "the cores of several machines all score"


def test_a_better_batch_size_is_named(make_config: Make) -> None:
    config = make_config("execution.processes=8", "execution.rollout_batch_size=4", "execution.device=cpu")
    cost = check_config(config, rewards=False)
    notes = "\n".join(idle_notes(config, cost, idle_shares(RunPlan(config), cost)))
    assert "rollout: 50% of the time of 8 processes makes nothing" in notes
    assert "4 shards" in notes
    assert "execution.rollout_batch_size 4. With 1 it is less than a tenth." in notes, "2 leaves evaluations half idle"
    assert "optimize: 88% of the time" in notes
