"""Refusals of combinations of settings: each names a setting that exists, and a config here reaches it.

To add a refusal, add a line to ``CASES``: settings of a preset that only it refuses, separated by semicolons.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from flowmill.configs.data import USUAL_COLUMNS
from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.refusals import Refusal
from flowmill.configs.schema import RunConfig
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.checks.check_data import check_data
from tests.conftest import ROOT
from tests.support import rooms
from tests.support.inside import plan_requiring

#: Modules that yield refusals.
MODULES = {
    name: path
    for name, path in rooms.modules().items()
    if name.startswith("tasks.") and "yield Refusal(" in path.read_text()
}
CASES = {
    "addition_sft": """
        optimize.algorithm={name: grpo}
        optimize.algorithm={name: kto}
        monitors=[{name: jpeg_compressibility, label: watch}]
        prompts.sampler=least_solved
        execution.ahead=1
        advantage.std=none
        data.buckets=[[16,16],[16,32]]
        data.prompt_image=image
        data.flip=true
    """,
    "digits_given_dpo": """
        optimize.algorithm={name: refl}
        optimize.algorithm={name: nft}
        optimize.algorithm={name: reward_gradient}
        data.buckets=[[16,16],[16,32]]; data.chosen=null; data.rejected=null; data.rating=taste
        data.prior={train: prompts/digits-pairs.parquet}
    """,
    "tiny_edit_sft": """
        data.prompt_image=null
        data.crop=random
    """,
    "tiny_agent": """
        render.model.policy=causal_lm
        render.model.gradient_checkpointing=true
        rewards.0.reads=texts; evaluate.judges=[]; render.turns=null
        render.turns.by=nothing
        optimize.shared_prompts=true
        render.turns.comment=''
        render.turns.sees=images
    """,
    "digits": """
        optimize.algorithm=refl; advantage.estimator={name: "tests.tasks.checks.test_plug_ins:Estimator"}
        rollout.tokens={engine: {name: "tests.tasks.checks.test_plug_ins:Engine"}}
        advantage.estimator=gae
        advantage.overlong={buffer: 2}
        optimize.stop_kl=0.1; optimize.algorithm={name: nft}
        advantage.mode=negative_only; optimize.algorithm=sft; rollout.plan={name: final}
        rollout.sampler={name: "tests.tasks.checks.test_plug_ins:Sampler"}; optimize.algorithm={name: nft}
        render={model: {policy: sd3, build: {name: digits}}, steps: 8}
        execution.strategy=fsdp
        execution.fsdp_size=2
        execution.processes=3; execution.fsdp_size=2; execution.strategy=fsdp
        execution.processes=4; execution.fsdp_size=2; execution.strategy=fsdp; execution.context_parallel=4
        execution.offload=true
        execution.sampling=spread
        execution.processes=2; execution.strategy=fsdp; model.compile=true
        execution.context_parallel=2
        execution.processes=2; execution.context_parallel=2
        optimize.algorithm={name: dpo}; execution.micro_batch_size=1
        execution.micro_batch_size=1; optimize.algorithm={name: crd}
        rollout.plan=final
        optimize.algorithm={name: awm}; rollout.plan=late
        optimize.algorithm={name: refl, options: {steps: 2}}
        optimize.algorithm={name: fdfo}
        rollout.own_noise=0.2
        rollout.same_noise=true; optimize.algorithm={name: nft}
        rollout.plan={name: window, options: {mode: progressive, stride: 6}}
        optimize.algorithm={name: dpo, options: {times: {shared: false}}}; rollout.plan=final
        advantage.soft_clip=3; advantage.clip=2
        rollout.plan={name: all, options: {keep_final: true}}; optimize.algorithm={name: fdfo}
        optimize.algorithm={name: opd, options: {teachers: {a: x, b: y}}}
        rollout.plan={name: all, options: {last: train}}; rollout.sampler={name: cps, options: {log_prob: squared}}
        optimize.algorithm={name: grpo_guard}; rollout.sampler={name: cps, options: {log_prob: squared}}
        optimize.algorithm={name: nft}; advantage.kl_coef=0.1
        optimize.algorithm={name: grpo, options: {kl_coef: 0.1, kl_reference: average}}
        rollout.solver=dpm2
        rollout.group_size=1
        rewards.0.weight=0
        rollout.unconditional=true
        rollout.unconditional=true; model.guidance_scale=4.5; optimize={guidance_gradient: conditional, algorithm: nft}
        rollout.unconditional=true; model.guidance_scale=4.5; optimize.guidance_gradient=conditional; optimize.replay={}
        rollout.unconditional=true; model.guidance_scale=4.5; optimize.guidance_gradient=conditional; execution.ahead=1
        optimize.algorithm={name: dgpo, options: {guided: false}}
        optimize.inner_epochs=2; optimize.algorithm={name: reward_gradient, options: {target: linear}}
        optimize.replay={}; optimize.algorithm={name: reward_gradient, options: {target: linear}}
        advantage.aggregation=gdpo
        advantage.std=running; advantage.buffer=8
        advantage.mean=leave_one_out
        advantage.informative=1000
        advantage.informative=1; rollout.group_size=1; advantage.mean=global
        advantage.diversity=doubt
        advantage.kl_gate=0.5
        advantage.kl_gate=0.5; advantage.kl_coef=0.1
        advantage.group_mean_min=2; advantage.group_mean_max=1
        optimize.replay={steps: 50}; optimize.algorithm={name: dpo}
        optimize.replay={max_importance: 5}; optimize.algorithm={name: nft}; rollout.plan=final
        optimize.replay={steps: 8}
        optimize.replay={epochs: 0}
        optimize.replay={epochs: 0, share: 0.5}; execution.ahead=1
    """,
    "tiny_flux1": """
        model.kind=tokens
        optimize.algorithm={name: nft, options: {times: {kind: timesteps}}}; rollout.plan={name: final}
        execution.processes=2; execution.context_parallel=2; model.compile=true
    """,
    "tiny_ltx2": """
        rollout.sampler.name=ode
        rollout.unconditional=true
    """,
    "tiny_sd15": """
        optimize.algorithm={name: awm}
    """,
    "janus_pro_1b_grpo": """
        optimize.algorithm={name: ppo}
        rollout.media.format=none
        advantage.estimator={name: reinforce, options: {kl_coef: 0.1}}
    """,
    "addition_grpo": """
        evaluate.solver="tests.tasks.checks.test_plug_ins:Solver"
        advantage.overlong={buffer: 999}
        optimize.algorithm={name: 'flowmill.tasks.algorithms.nft:NFT'}
        execution.sampling=spread; execution.processes=2; execution.strategy=fsdp
        advantage.kl_coef=0.1
        rollout.group_size=1
        advantage.estimator=gae
        optimize.algorithm={name: reinforce_plus_plus}; advantage={estimator: group}
        optimize.algorithm={name: rloo}; advantage={estimator: rloo}
        optimize.algorithm={name: dpo}; advantage={estimator: reinforce}
        execution.processes=2; rollout.tokens.engine={name: openai, options: {endpoint: http://h, model: x, folder: /t}}
        rollout.tokens.engine={name: openai, options: {endpoint: 'http://127.0.0.1:1', model: x}}
        model.dtype=bfloat16
        optimize.algorithm={name: rloo}
        optimize.replay={epochs: 0, steps: 2}
        advantage.mean=global
        execution.micro_batch_size=2
        optimize.shared_prompts=false; optimize.algorithm=dpo; execution.micro_batch_size=1
    """,
    "addition_ppo": """
        advantage.estimator=rloo
        advantage.mode=positive_only
        critic.backbone=policy
        critic={backbone: policy, log_probs: false, path: elsewhere}
    """,
}
#: Of given samples: what only an algorithm of one's own needs, and a family that other checks refuse before.
GIVEN: list[tuple[dict[str, Any], str]] = [
    ({"per_token": True}, "model.policy=sd3"),
    ({"same_noise": True}, "model.policy=sd3"),
    ({}, "model.policy=wan21_v2v"),
]


@dataclass
class Recorder:
    """Stands for ``Refusal`` in all modules, and notes where each refusal was yielded."""

    places: set[tuple[str, int]] = field(default_factory=set)
    settings: set[str] = field(default_factory=set)

    def __call__(self, *refusal: str) -> Refusal:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "never_called":
            assert frame.f_back is not None
            frame = frame.f_back
        self.places.add((frame.f_globals["__name__"], frame.f_lineno))
        self.settings.add(refusal[0])
        return Refusal(*refusal)


def places_of(module: str, path: Path) -> set[tuple[str, int]]:
    """Return the lines of a module that yield refusals."""
    return {
        (f"flowmill.{module}", node.lineno)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Yield | ast.YieldFrom)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id in ("Refusal", "never_called")
    }


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in ("configs.refusals", *MODULES):
        monkeypatch.setattr(import_module(f"flowmill.{name}"), "Refusal", recorder)
    return recorder


def test_each_refusal_is_reached_by_a_config_and_names_a_setting(recorder: Recorder) -> None:
    messages = []
    for preset, lines in CASES.items():
        for line in lines.strip().splitlines():
            config = load_config(ROOT / "configs" / f"{preset}.yaml", line.strip().split("; "))
            with pytest.raises(ConfigError) as error:
                check_config(config, rewards=False)
            messages.append(str(error.value))
    for needs, override in GIVEN:
        config = load_config(ROOT / "configs" / "digits_given_dpo.yaml", [override])
        with pytest.raises(ConfigError) as error:
            check_data(plan_requiring(config, data="forward", **needs))
        messages.append(str(error.value))
    places = {place for name, path in MODULES.items() for place in places_of(name, path)}
    assert len(places) > 60
    assert sorted(places - recorder.places) == []
    assert len(set(messages)) > 80
    assert [text for text in messages if not text.endswith(".")] == []
    for setting in recorder.settings:
        assert_setting_exists(setting)


def assert_setting_exists(setting: str) -> None:
    section: Any = RunConfig
    # The names of columns are keys of a mapping.
    place, _, column = setting.partition("data.columns.")
    assert not column or column in USUAL_COLUMNS, setting
    for name in place.split(".") if place else ("data", "columns"):
        assert name in getattr(section, "model_fields", ()), setting
        annotation = section.model_fields[name].annotation
        sections = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
        section = next((each for each in sections if issubclass(each, BaseModel)), None)
