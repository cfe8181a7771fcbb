"""What samples, training and exports of diffusion and flow-matching policies depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.rewards import RewardSection
from configs.schema import RunConfig
from models.policies import IMAGE_CONDITIONED, NOISE_RANGE, NOT_ENCODED, POLICIES
from tasks.inputs.components import algorithm_needs, as_evaluated, call_options, make_algorithm
from tasks.specs.graph import has_gradients
from tasks.specs.modalities import ModalitySpec


class DiffusionSpec(ModalitySpec):
    """Steps, samplers, solvers, sizes and media."""

    def encoding_options(self, config: RunConfig) -> Mapping[str, Any]:
        """What identifies the encoder, and where it encodes images too, the size they are scaled to."""
        model = config.model
        unused = NOT_ENCODED.get(model.policy, frozenset())
        options = {name: value for name, value in model.options.items() if name not in unused}
        about = {"policy": model.policy, "dtype": model.dtype, "options": options}
        # What a family of one's own encodes is not known.
        if model.policy in POLICIES and model.policy not in IMAGE_CONDITIONED:
            return about
        return {**about, "height": model.height, "width": model.width, "frames": model.frames}

    def rollout_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Everything that changes samples; shard and batch sizes do not."""
        rollout = config.rollout.fingerprinted({"groups_per_shard", "unconditional", "tokens"})
        more: dict[str, Any] = {}
        if algorithm_needs(config).old_means:
            more["means"] = True
        if config.rollout.unconditional:
            more["unconditional"] = True
        if config.advantage.kl_coef > 0:
            more["reference_kl"] = True
        return {"rollout": rollout, "model": call_options(config), **more}

    def evaluation_options(self, config: RunConfig) -> Mapping[str, Any]:
        """Steps, solver, how the model is called, and what is stored."""
        return {**_drawn(config), "media": config.rollout.media.fingerprinted()}

    def training_options(self, config: RunConfig) -> Mapping[str, Any]:
        """The step the log-probs belong to, and what of rewards enters training."""
        summed = {"gradient_weights": [reward.weight for reward in config.rewards]} if has_gradients(config) else {}
        asked: dict[str, Any] = {}
        if algorithm_needs(config).rewards:
            # What is asked while training, and how the model is called that decodes for it.
            asked = {"asked": [_asked(reward) for reward in config.rewards], "model": call_options(config)}
        return {"sampler": config.rollout.sampler.model_dump(mode="json"), **summed, **asked, **_ends(config)}

    def export_options(self, config: RunConfig) -> Mapping[str, Any]:
        """How the model is called."""
        return {**_drawn(config), "fps": config.rollout.media.fps}


def _ends(config: RunConfig) -> dict[str, Any]:
    """Return what final latents count as in training, of families whose chains end above level 0.

    Policies that were trained on final latents without their length have other names. An algorithm of the user's own
    is not imported to find out whether it takes the ends.
    """
    if config.model.policy not in NOISE_RANGE:
        return {}
    takes_ends = ":" in config.optimize.algorithm.name or make_algorithm(config).requires.ends
    return {"ends": "clean"} if takes_ends else {}


def _asked(reward: RewardSection) -> dict[str, Any]:
    """Return what a reward says, and for which prompts; who computes it, and how many rows at a time, is no part."""
    return reward.model_dump(mode="json", include={"name", "options", "weight", "frames", "over_frames", "sources"})


def _drawn(config: RunConfig) -> dict[str, Any]:
    """Return what images of an evaluation are drawn with."""
    section = config.evaluate
    steps = section.steps or config.rollout.steps
    return {"steps": steps, "solver": section.solver, "model": call_options(as_evaluated(config))}
