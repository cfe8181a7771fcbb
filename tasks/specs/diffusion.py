"""Options of samples, training and exports of diffusion and flow-matching policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowmill.configs.model_families import spec_of
from flowmill.configs.rewards import RewardSection
from flowmill.models.engines import engine_identity
from flowmill.models.maths import PLANS
from flowmill.models.maths.schedules import BranchEveryStep, Window
from flowmill.models.policies import POLICIES
from flowmill.models.policies.attention import attention_identity
from flowmill.tasks.inputs.components import call_options, guidance_options, make_plan
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.specs.modalities import ModalitySpec


class DiffusionSpec(ModalitySpec):
    """Steps, samplers, solvers, sizes and media."""

    def encoding_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """The encoder, and if it also encodes images, the size they are scaled to."""
        model = plan.config.model
        unused = spec_of(model.policy).not_encoded
        options = {name: value for name, value in model.options.items() if name not in unused}
        encoding = {"policy": model.policy, "dtype": model.dtype, "options": options}
        if model.quantize is not None and model.quantize.text_encoders is not None:
            encoding["quantize"] = model.quantize.text_encoders
        # A custom family may encode images.
        if model.policy in POLICIES and spec_of(model.policy).starts_from == "text":
            return encoding
        return {**encoding, "height": model.height, "width": model.width, "frames": model.frames}

    def rollout_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Everything that changes samples; shard and batch sizes do not."""
        rollout = plan.config.rollout.fingerprinted({"groups_per_shard", "unconditional", "tokens", "engine"})
        more: dict[str, Any] = engine_identity(plan.config.rollout.engine)
        if plan.needs.old_means:
            more["means"] = True
        if plan.config.rollout.unconditional:
            more["unconditional"] = True
        if plan.config.advantage.kl_coef > 0:
            more["reference_kl"] = True
        return {"rollout": rollout, "model": call_options(plan.config), **more}

    def redrawn_options(self, plan: ResolvedConfig, epoch: int) -> Mapping[str, Any]:
        """Windows that start again at ``low``, and branches in the order of their trunks.

        Plans of the user's own are not imported to name a rollout.
        """
        rollout = plan.config.rollout
        if rollout.plan.name not in PLANS:
            return {}
        drawn, trunks = make_plan(plan.config), rollout.prompts_per_epoch * rollout.group_size
        if isinstance(drawn, Window) and drawn.moved(rollout.steps, epoch):
            return {"starts_at_low": True}
        ordered = isinstance(drawn, BranchEveryStep) and trunks > 1 and drawn.per_trunk(rollout.steps) > 1
        return {"by_trunk": True} if ordered else {}

    def given_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Size, precision, levels, and stored media."""
        model, rollout, data = plan.config.model, plan.config.rollout, plan.config.data
        return {
            "size": [model.frames, model.height, model.width],
            "dtype": model.dtype,
            "options": model.options,
            "steps": rollout.steps,
            "latents_dtype": rollout.latents_dtype,
            "media": rollout.media.fingerprinted(),
            **({"buckets": data.buckets} if data is not None and data.buckets else {}),
            # Autoencoders encode in tiles, too.
            **({"vae_tiling": True} if model.vae_tiling else {}),
        }

    def evaluation_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Steps, solver, arguments of the model, and stored media."""
        return {**_drawn(plan), "media": plan.config.rollout.media.fingerprinted()}

    def training_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """The sampler of log-probs, and the rewards that enter training."""
        summed = {"gradient_weights": [reward.weight for reward in plan.config.rewards]} if plan.needs.gradients else {}
        rewards: dict[str, Any] = {}
        if plan.needs.rewards:
            # Rewards that are called while training, and arguments of the model that decodes for them.
            called = [_reward_options(reward) for reward in plan.config.rewards]
            rewards = {"asked": called, "model": call_options(plan.config)}
        sampler = plan.config.rollout.sampler.model_dump(mode="json")
        return {"sampler": sampler, **summed, **rewards, **_ends(plan), **_called_on_data(plan)}

    def export_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """How the model is called."""
        return {**_drawn(plan), "fps": plan.config.rollout.media.fps}


def _ends(plan: ResolvedConfig) -> dict[str, Any]:
    """Return the treatment of final latents in training, for families whose chains end above level 0.

    Policies that were trained on final latents without their length have other fingerprints.
    """
    return {"ends": "clean"} if plan.family_spec.noise_range and plan.needs.ends else {}


def _called_on_data(plan: ResolvedConfig) -> dict[str, Any]:
    """Return how the model is called on ingested samples, as far as their id does not name it; that of a rollout does.

    Earlier versions left it out, so the usual values are not named.
    """
    config = plan.config
    if config.data is None:
        return {}
    is_input = plan.family_spec.guidance == "input"
    guidance = guidance_options(config) if is_input or plan.needs.guided else {}
    attention = attention_identity(config.model.attention)
    named = {} if is_input and guidance == {"guidance_scale": 1.0} else guidance
    return {**named, **({} if attention == "exact" else {"attention": attention})}


def _reward_options(reward: RewardSection) -> dict[str, Any]:
    """Return the settings of a reward that change its scores; server and batch size do not."""
    chosen = reward.model_dump(mode="json", include={"name", "options", "weight", "frames", "sources"})
    return {**chosen, **reward.former}


def _drawn(plan: ResolvedConfig) -> dict[str, Any]:
    section = plan.config.evaluate
    steps = section.steps or plan.config.rollout.steps
    return {"steps": steps, "solver": section.solver, "model": call_options(plan.evaluated.config)}
