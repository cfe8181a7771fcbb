"""Samples that are images, clips, sounds or latents: decoding, and inputs of rewards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import families, spec_of
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.policies import POLICIES
from flowmill.models.policies.base import Policy
from flowmill.models.policies.compute_meter import timed
from flowmill.models.rewards.base import Needs
from flowmill.storage.trajectories.base import TrajectoryShard


def check_scored(section: RewardSection, needs: Needs, config: RunConfig) -> None:
    """Check that samples hold the media a reward scores."""
    media, slot = config.rollout.media, section.slot
    if needs.media == "texts":
        raise ConfigError(
            f"rewards: '{slot}' scores texts, but model.policy '{config.model.policy}' makes "
            f"{'clips' if config.model.makes_clips else 'images'}. Choose a reward that reads those."
        )
    if needs.media == "latents" and not media.latents:
        raise ConfigError(
            f"rewards: '{slot}' scores latents, which are not kept. Set rollout.media.latents to true; if no other "
            "reward reads images, rollout.media.format 'none' also saves the decoding."
        )
    if needs.media != "latents" and not media.decodes:
        raise ConfigError(
            f"rewards: '{slot}' scores {'images' if needs.media == 'samples' else needs.media}, but "
            "rollout.media.format is 'none' and nothing is decoded. Set it to 'auto', or take a reward that scores "
            "latents."
        )
    family = config.model.policy
    if needs.media == "sounds" and family in POLICIES and spec_of(family).frame_rate is None:
        raise ConfigError(
            f"rewards: '{slot}' scores sounds, but samples of model.policy '{family}' have none. Choose a model of "
            f"clips with sound ({', '.join(families(lambda spec: spec.frame_rate))}), or a reward that reads images."
        )
    if needs.media == "clips" and section.frames != "clip":
        raise ConfigError(
            f"rewards: '{slot}' scores whole clips, but its 'frames' is {section.frames!r}. Set it to 'clip', with a "
            "model.policy that makes clips."
        )


def heard(shard: TrajectoryShard, rate: int | None) -> np.ndarray:
    """Return (B, N, C) float32 sounds of a shard from -1 to 1, resampled to ``rate`` if that is not None."""
    sounds = [shard.sound(row) for row in range(shard.table.num_rows)]
    brought = [sound if rate is None else sound.at(rate) for sound in sounds]
    return np.stack([sound.samples for sound in brought]).astype(np.float32) / np.float32(32768)


def trial_media(config: RunConfig) -> np.ndarray:
    """Return one synthetic sample: (1, H, W, 3) uint8, or (1, F, H, W, 3) for clips."""
    model = config.model
    frames = (model.frames,) if model.makes_clips else ()
    return np.random.default_rng(0).integers(0, 256, (1, *frames, model.height, model.width, 3), np.uint8)


def decode_in_slices(policy: Policy, decode: Callable[[Tensor], Tensor], latents: Tensor, size: int) -> Tensor:
    """Return the decoded media of (B, ...) final latents, on the CPU, ``size`` rows at a time.

    The last slice is padded to ``size`` rows, because kernels differ with the number of rows.
    """
    padding = latents[-1:].expand(-len(latents) % size, *latents.shape[1:])
    parts = torch.cat([latents, padding]).split(size)
    with timed(policy.meter):
        return torch.cat([decode(part).cpu() for part in parts])[: len(latents)]
