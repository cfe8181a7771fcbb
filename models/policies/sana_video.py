"""SANA-Video (SanaVideoPipeline): SANA over clips, with Wan's autoencoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from models.policies.clips import ClipPolicy
from models.policies.sana import Sana

_AUTOENCODER = "AutoencoderKLWan"


class SanaVideo(ClipPolicy, Sana):
    """Adapter for SanaVideoPipeline; latents are (B, 16, f, h, w)."""

    pipeline_name = "SanaVideoPipeline"
    family = "sana_video"
    frames_argument = "frames"

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        super()._check_scheduler(folder, index)
        made = index["vae"][1]
        if made != _AUTOENCODER:
            raise ConfigError(
                f"model.path '{folder}' has the autoencoder {made}, but model.policy '{cls.family}' knows the clips of "
                f"{_AUTOENCODER} alone. Use a model of 480 pixels, such as "
                "'Efficient-Large-Model/SANA-Video_2B_480p_diffusers'."
            )
