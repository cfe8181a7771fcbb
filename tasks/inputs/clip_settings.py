"""Checks of clip settings against the model family: number of frames, frame rate, and the frames that are scored."""

from __future__ import annotations

from flowmill.configs.components import reward_sections
from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import spec_of
from flowmill.configs.registry import option_names, resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.policies import POLICIES


def check_clips(config: RunConfig) -> None:
    """Check frames, their rate, how clips are stored, and which frames rewards look at."""
    family, frames, media = config.model.policy, config.model.frames, config.rollout.media.format
    clips = spec_of(family).clips
    if clips is None and frames != 1:
        raise ConfigError(f"model.frames is {frames}, but model.policy '{family}' makes images. Set it to 1.")
    if clips is not None and frames not in clips:
        raise ConfigError(
            f"model.frames is {frames}, but model.policy '{family}' takes {clips}. "
            f"{clips.nearest(frames)}; set it to one of them."
        )
    _check_rate(config)
    if media not in ("auto", "none") and bool(clips) != (media == "mp4"):
        kind = "clips" if clips else "images"
        raise ConfigError(
            f"rollout.media.format is '{media}', but model.policy '{family}' makes {kind}, which that cannot hold. "
            "Set it to 'auto'."
        )
    for section in reward_sections(config):
        if not clips and section.frames != 1:
            raise ConfigError(
                f"rewards: 'frames' of '{section.slot}' is {section.frames!r}, but model.policy '{family}' makes "
                "images, of which there is nothing to choose. Remove it."
            )


def _check_rate(config: RunConfig) -> None:
    """Check that clips are stored at the frame rate for which the family generates their sound."""
    family, stored = config.model.policy, config.rollout.media.fps
    rate = config.model.options.get("frame_rate", spec_of(family).frame_rate)
    if spec_of(family).frame_rate is None or rate == stored:
        return
    chosen = "frame_rate" in option_names(resolve(POLICIES, family, label="model.policy").options_type)
    raise ConfigError(
        f"rollout.media.fps is {stored}, but model.policy '{family}' makes {rate} frames for a second of sound"
        f"{' (model.options.frame_rate)' if chosen else ''}. Stored otherwise the two would drift apart: set "
        f"{'both to one number' if chosen else f'it to {rate:g}'}."
    )
