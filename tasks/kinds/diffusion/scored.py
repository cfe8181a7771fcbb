"""What rewards can be given of diffusion samples: images, clips or latents."""

from __future__ import annotations

import numpy as np

from configs.errors import ConfigError
from configs.rewards import RewardSection
from configs.schema import RunConfig
from models.rewards.base import Needs


def check_scored(section: RewardSection, needs: Needs, config: RunConfig) -> None:
    """Check that samples hold what a reward scores.

    Raises:
        ConfigError: they do not.
    """
    media, slot = config.rollout.media, section.slot
    if needs.media == "texts":
        raise ConfigError(
            f"rewards: '{slot}' scores texts, but model.policy '{config.model.policy}' makes "
            f"{'clips' if config.model.frames > 1 else 'images'}. Choose a reward that looks at those."
        )
    if needs.media == "latents" and not media.latents:
        raise ConfigError(
            f"rewards: '{slot}' scores latents, which are not kept. Set rollout.media.latents to true; where no other "
            "reward looks at images, rollout.media.format 'none' also spares the decoding."
        )
    if needs.media != "latents" and not media.decodes:
        raise ConfigError(
            f"rewards: '{slot}' scores {needs.media}, but rollout.media.format is 'none' and nothing is decoded. Set "
            "it to 'auto', or take a reward that scores latents."
        )
    if needs.media == "clips" and section.frames != "clip":
        raise ConfigError(
            f"rewards: '{slot}' scores whole clips, but its 'frames' is {section.frames!r}. Set it to 'clip', with a "
            "model.policy that makes clips."
        )


def trial_media(config: RunConfig) -> np.ndarray:
    """Return one made-up sample: (1, H, W, 3) uint8, or (1, F, H, W, 3) for clips."""
    model = config.model
    frames = (model.frames,) if model.frames > 1 else ()
    return np.random.default_rng(0).integers(0, 256, (1, *frames, model.height, model.width, 3), np.uint8)
