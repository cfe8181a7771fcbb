"""Checks of clip settings against the model family: number of frames, frame rate, and the frames that are scored."""

from __future__ import annotations

from flowmill.configs.components import reward_sections
from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import option_names
from flowmill.tasks.inputs.resolved import ResolvedConfig


def check_clips(plan: ResolvedConfig) -> None:
    """Check frames, their rate, how clips are stored, and which frames rewards look at."""
    config, clips = plan.config, plan.family_spec.clips
    family, frames, media = config.model.policy, config.model.frames, config.rollout.media.format
    if clips is None and frames != 1:
        raise ConfigError(f"model.frames is {frames}, but model.policy '{family}' makes images. Set it to 1.")
    if clips is not None and frames not in clips:
        raise ConfigError(
            f"model.frames is {frames}, but model.policy '{family}' takes {clips}. "
            f"{clips.nearest(frames)}; set it to one of them."
        )
    _check_rate(plan)
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


def _check_rate(plan: ResolvedConfig) -> None:
    """Check that clips are stored at the frame rate for which the family generates their sound."""
    model, stored, usual = plan.config.model, plan.config.rollout.media.fps, plan.family_spec.frame_rate
    family, rate = model.policy, model.options.get("frame_rate", usual)
    if usual is None or rate == stored:
        return
    chosen = "frame_rate" in option_names(plan.family.options_type)
    raise ConfigError(
        f"rollout.media.fps is {stored}, but model.policy '{family}' makes {rate} frames for a second of sound"
        f"{' (model.options.frame_rate)' if chosen else ''}. Stored otherwise the two would drift apart: set "
        f"{'both to one number' if chosen else f'it to {rate:g}'}."
    )
