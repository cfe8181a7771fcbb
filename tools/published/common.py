"""What tables of published settings share: builders of settings, adapted layers, Flow-GRPO's base."""

from __future__ import annotations

from typing import Any

FLOW_GRPO = "https://github.com/yifan123/flow_grpo/blob"

JOINT = [
    f"attn.{n}" for n in ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
]
FLUX = [*JOINT, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
WAN_ATTENTION = [f"attn{n}.{name}" for n in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")]
QWEN_IMAGE = [*JOINT, *(f"{stream}_mlp.{name}" for stream in ("img", "txt") for name in ("net.0.proj", "net.2"))]

#: Of models of one stream.
SINGLE = [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]
QWEN_IMAGE21 = [*SINGLE, *(f"img_mlp.{name}" for name in ("proj", "gate_layer", "out"))]


def lora(rank: int, alpha: int, targets: list[str]) -> dict[str, Any]:
    """Return adapter settings."""
    return {"model.lora.rank": rank, "model.lora.alpha": alpha, "model.lora.targets": sorted(targets)}


def size(height: int, width: int | None = None) -> dict[str, Any]:
    """Return the size of images, square without a width."""
    return {"model.height": height, "model.width": width or height}


def groups(number: int, samples: int, steps: int) -> dict[str, Any]:
    """Return so many groups of so many samples, and denoising steps."""
    return {"rollout.prompts_per_epoch": number, "rollout.group_size": samples, "rollout.steps": steps}


def plan(name: str, **options: Any) -> dict[str, Any]:
    """Return a rollout plan and its options."""
    return {"rollout.plan.name": name, **{f"rollout.plan.options.{key}": value for key, value in options.items()}}


def noise(name: str, **options: Any) -> dict[str, Any]:
    """Return a sampler and its options."""
    return {"rollout.sampler.name": name, **{f"rollout.sampler.options.{key}": value for key, value in options.items()}}


def about(path: str, data: str, rewards: str, guidance: float, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return model, precision, guidance, data and rewards."""
    return {
        "model.path": path,
        "model.dtype": dtype,
        "model.guidance_scale": guidance,
        "prompts.train": data,
        "rewards": rewards,
    }


EMA = {"optimize.ema.decay": 0.9, "optimize.ema.every": 8}
CLIP, KL = "optimize.algorithm.options.clip_range", "optimize.algorithm.options.kl_coef"
ADAM = {
    "optimize.betas": [0.9, 0.999],
    "optimize.weight_decay": 1e-4,
    "optimize.max_grad_norm": 1.0,
    "advantage.clip": 5.0,
    CLIP: 1e-4,
}
#: Flow-GRPO's config/base.py and stat_tracking.py; TempFlow-GRPO changes Flow-GRPO and states none of these.
GRPO_BASE = {
    **ADAM,
    "optimize.epsilon": 1e-8,
    "optimize.learning_rate": 3e-4,
    "optimize.inner_epochs": 1,
    KL: 0.0,
    "optimize.algorithm.name": "grpo",
    "advantage.aggregation": "sum",
    "advantage.epsilon": 1e-4,
    "advantage.floor": "add",
    "advantage.unbiased": False,
}
BOTH = {"optimize.guidance_gradient": "both"}
#: The file with them.
GRPO_BASE_FILE = f"{FLOW_GRPO}/54809b5fcf4d3930d2a17fa553928704bd0b719e/config/base.py"
