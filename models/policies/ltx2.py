"""LTX-2 (LTX2Pipeline): clips with sound, denoised together by one transformer.

A chain is one tensor: the tokens of the clip, then those of the sound, with the same width. Both use the same noise
levels, so steps, solvers and losses need not distinguish them.

Guidance by a negative prompt is supported, with a scale per medium. The pipeline's other two kinds of guidance, by
skipping blocks and by separating the media, are not: each would need another forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import ClipLengths
from flowmill.configs.option_types import Share
from flowmill.models.library_loading import read_json
from flowmill.models.maths.guidance import guided, rescaled_guided
from flowmill.models.maths.transitions import expand
from flowmill.models.policies.clips import ClipPolicy
from flowmill.models.policies.diffusion import DiffusionSettings, Images, SoundForm
from flowmill.models.policies.nan_checks import waves
from flowmill.models.policies.pipeline import Modules, Rows
from flowmill.models.policies.pipeline_configs import FLOW, Fields
from flowmill.models.policies.tokenization import Reader

#: The pipeline's defaults for a scheduler's bounds.
_BOUNDS = {"base_image_seq_len": 1024, "max_image_seq_len": 4096, "base_shift": 0.95, "max_shift": 2.05}

#: Samples of a window of the spectrograms, which diffusers' configs leave out; as in the authors' code.
_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LTX2Options:
    """Options of the family."""

    max_sequence_length: PositiveInt = 1024
    """Gemma tokens that are read; a multiple of the connectors' registers, 128 in published models."""
    frame_rate: PositiveFloat = 24.0
    """Frames per second, which determine the length of the sound; `rollout.media.fps` must be the same."""
    audio_guidance_scale: PositiveFloat | None = None
    """Guidance of the sound; that of the clip when absent."""
    guidance_rescale: Share = 0.0
    """How far guided predictions of clean latents are rescaled to the std of the positive ones; 0: not at all."""


class LTX2(ClipPolicy):
    """Adapter for LTX2Pipeline; latents are (B, S + L, C): S tokens of the clip and L of the sound."""

    pipeline_name = "LTX2Pipeline"
    family = "ltx2"
    options_type = LTX2Options
    options: LTX2Options
    lengths = ClipLengths(every=8)
    text_parts = ("text_encoder", "tokenizer", "connectors")
    unused_parts = ("processor", "prompt_enhancer", "duration_head")
    decoder_names = ("vae", "audio_vae", "vocoder")
    measured_names = ("vae", "audio_vae")
    readers = (Reader(tokenizer="tokenizer", written=lambda _, text: text.strip()),)
    schedulers: ClassVar[Mapping[str, Fields]] = {"FlowMatchEulerDiscreteScheduler": FLOW}
    size_unit = 32
    blocks = ("transformer_blocks",)
    # Both streams' attention to themselves, to text and to each other.
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, pipeline: Any, settings: DiffusionSettings, options: Any) -> None:
        """Wrap a loaded pipeline; raise ConfigError if guidance is on for the sound and off for the clip."""
        super().__init__(pipeline, settings, options)
        sound = options.audio_guidance_scale
        if settings.guidance_scale <= 1 and sound is not None and sound > 1:
            raise ConfigError(
                f"model.options.audio_guidance_scale is {sound:g}, but model.guidance_scale is "
                f"{settings.guidance_scale:g}, which turns guidance off: there is no prediction for a negative prompt. "
                "Raise model.guidance_scale, or remove the option."
            )

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` and ``audio_prompt_embeds`` (B, L, D), their common ``mask`` (B, L) int64."""
        pipeline, device = self.pipeline, self.settings.device
        length = self.options.max_sequence_length
        embeds, mask, *_ = pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=False, max_sequence_length=length, device=device
        )
        video, audio, mask = pipeline.connectors(embeds, mask, padding_side=pipeline.tokenizer.padding_side)
        return {"prompt_embeds": video, "audio_prompt_embeds": audio, "mask": mask.long()}

    def apart(self, latents: Tensor) -> tuple[Tensor, ...]:
        """Split latents into the tokens of the clip, all or those generated, and those of the sound."""
        sound = self._sound_length()
        return latents.split([latents.shape[1] - sound, sound], dim=1)

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, S + L, C) float32 noise; the clip's is drawn before the sound's."""
        from diffusers.utils.torch_utils import randn_tensor

        pipeline, settings, config = self.pipeline, self.settings, self.pipeline.transformer.config
        batch, options, drawn = len(generators), (torch.float32, settings.device), list(generators)
        levels = pipeline.audio_vae.config.mel_bins
        channels = config.audio_in_channels * pipeline.audio_vae_mel_compression_ratio // levels
        whole = (batch, config.in_channels, *self._shape())
        # Not by the pipeline's method, as that of some tasks also needs images.
        clip = pipeline._pack_latents(randn_tensor(whole, drawn, settings.device, torch.float32))
        sound = pipeline.prepare_audio_latents(batch, channels, self._sound_length(), levels, 0.0, *options, drawn)
        return torch.cat([clip, sound], dim=1)

    def image_tokens(self) -> int:
        """Return the number of the clip's tokens, which determine the shift of both media."""
        return math.prod(self._shape())

    def shift_bounds(self) -> Mapping[str, float]:
        return _BOUNDS

    def guide(self, negative: Tensor, positive: Tensor, sigma: Tensor, latents: Tensor) -> Tensor:
        """Return the guided prediction; each medium has its own scale and is rescaled separately."""
        clip, rescale = self.settings.guidance_scale, self.options.guidance_rescale
        scales = (clip, self.options.audio_guidance_scale or clip)
        parts = []
        for scale, low, high, at in zip(scales, *map(self.apart, (negative, positive, latents)), strict=True):
            if rescale == 0:
                parts.append(guided(low, high, scale))
                continue
            # Clean latents x - sigma v are rescaled.
            level = expand(sigma, at)
            clean = rescaled_guided(at - level * low, at - level * high, scale, rescale)
            parts.append((at - clean) / level)
        return torch.cat(parts, dim=1)

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        clip, sound = self.apart(latents)
        (frames, height, width), time = self._shape(), sigma * 1000
        seen, heard = modules["transformer"](
            audio_hidden_states=sound,
            encoder_hidden_states=rows["prompt_embeds"],
            audio_encoder_hidden_states=rows["audio_prompt_embeds"],
            audio_timestep=time,
            sigma=time,
            encoder_attention_mask=rows["mask"],
            audio_encoder_attention_mask=rows["mask"],
            num_frames=frames,
            height=height,
            width=width,
            fps=self.options.frame_rate,
            audio_num_frames=sound.shape[1],
            return_dict=False,
            **self.clip_inputs(clip, time, rows),
        )
        return torch.cat([seen[:, -clip.shape[1] :], heard], dim=1)

    def clip_inputs(self, clip: Tensor, time: Tensor, rows: Rows) -> dict[str, Any]:
        """Return the transformer's arguments for (B, S, C) tokens of clips at times (B,), 0 to 1000."""
        return {"hidden_states": clip, "timestep": time}

    def clip_latents(self, latents: Tensor) -> Tensor:
        """Return the (B, C, f, h, w) latents of clips for the autoencoder, from (B, S + L, C) final latents."""
        pipeline, vae = self.pipeline, self.pipeline.vae
        tokens = pipeline._unpack_latents(self.apart(latents)[0], *self._shape())
        statistics = (vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        return pipeline._denormalize_latents(tokens, *statistics)

    def sound_latents(self, latents: Tensor) -> Tensor:
        """Return the (B, c, L, m) latents of sounds for their autoencoder, from (B, S + L, C) final latents."""
        pipeline, vae = self.pipeline, self.pipeline.audio_vae
        levels = vae.config.mel_bins // pipeline.audio_vae_mel_compression_ratio
        tokens = pipeline._denormalize_audio_latents(self.apart(latents)[1], vae.latents_mean, vae.latents_std)
        return pipeline._unpack_audio_latents(tokens, tokens.shape[1], num_mel_bins=levels)

    def encoded(self, media: Tensor) -> Tensor:
        """Return the (B, S, C) tokens of (B, 3, F, H, W) clips, the inverse of ``clip_latents``."""
        pipeline, vae = self.pipeline, self.pipeline.vae
        statistics = (vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        packed: Tensor = pipeline._pack_latents(pipeline._normalize_latents(self.likeliest(media), *statistics))
        return packed

    @property
    def sound_form(self) -> SoundForm:
        pipeline, channels = self.pipeline, self.pipeline.audio_vae.config.in_channels
        unit = pipeline.audio_vae_temporal_compression_ratio * pipeline.audio_hop_length
        return SoundForm(rate=pipeline.audio_sampling_rate, channels=channels, length=self._sound_length() * unit)

    @torch.no_grad()
    def encode_sounds(self, sounds: Tensor) -> Tensor:
        """Return the (B, L, C) tokens of sounds, the inverse of ``sound_latents``. The autoencoder is causal, and gives
        one latent more, as in the authors' pipeline of sound to clips."""
        pipeline, vae = self.pipeline, self.pipeline.audio_vae
        seen = _spectrograms(sounds, vae.config).to(vae.device, vae.dtype)
        tokens = pipeline._pack_audio_latents(vae.encode(seen, return_dict=False)[0].mode())
        tokens = pipeline._normalize_audio_latents(tokens, vae.latents_mean, vae.latents_std)
        return tokens[:, : self._sound_length()].float()

    def decoded(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.decode(self.clip_latents(latents).to(vae.dtype), None, return_dict=False)[0]

    @property
    def sound_rate(self) -> int:
        return int(self.pipeline.vocoder.config.output_sampling_rate)

    @torch.no_grad()
    def sounds(self, latents: Tensor) -> Tensor:
        """Return (B, N, C) int16 sound of (B, S + L, C) final latents."""
        vae = self.pipeline.audio_vae
        spectrograms = vae.decode(self.sound_latents(latents).to(vae.dtype), return_dict=False)[0]
        return waves(self.pipeline.vocoder(spectrograms))

    def _shape(self) -> tuple[int, int, int]:
        """Return the latent frames, height and width of a clip, with one token per latent."""
        settings, pipeline = self.settings, self.pipeline
        side = pipeline.vae_spatial_compression_ratio
        frames = (settings.frames - 1) // pipeline.vae_temporal_compression_ratio + 1
        return frames, settings.height // side, settings.width // side

    def _sound_length(self) -> int:
        """Return the number of latents, or tokens, of a sound as long as the clip."""
        pipeline = self.pipeline
        per_second: float = pipeline.audio_sampling_rate / pipeline.audio_hop_length
        per_second /= pipeline.audio_vae_temporal_compression_ratio
        return round(self.settings.frames / self.options.frame_rate * per_second)

    def more_arguments(self, steps: int) -> dict[str, Any]:
        """Return the arguments of clips and sound; other kinds of guidance are off."""
        scale, options = self.settings.guidance_scale, self.options
        guided = scale > 1
        off: dict[str, Any] = {"stg_scale": 0.0, "audio_stg_scale": 0.0, "spatio_temporal_guidance_blocks": None}
        off |= {"modality_scale": 1.0, "audio_modality_scale": 1.0}
        rescale = options.guidance_rescale if guided else 0.0
        return {
            **super().more_arguments(steps),
            "frame_rate": options.frame_rate,
            "audio_guidance_scale": (options.audio_guidance_scale or scale) if guided else 1.0,
            "guidance_rescale": rescale,
            "audio_guidance_rescale": rescale,
            **off,
        }

    @classmethod
    def check_folder(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        """Check the folder, and that tokens of both media have the same width and decoding draws no noise."""
        index = super().check_folder(folder, settings)
        vae, denoiser = (read_json(folder / part / "config.json") for part in ("vae", "transformer"))
        widths = [denoiser.get(name, 128) for name in ("in_channels", "audio_in_channels")]
        if widths[0] != widths[1]:
            raise ConfigError(
                f"model.path '{folder}': tokens of its clips are {widths[0]} wide and those of its sounds {widths[1]}; "
                f"model.policy '{cls.family}' joins them in one chain, for which they must be as wide. Choose another "
                "model."
            )
        patches = {denoiser.get(name, 1) for name in ("patch_size", "patch_size_t")}
        if patches != {1} or vae.get("timestep_conditioning"):
            fault = "draws noise when it decodes" if patches == {1} else "has tokens of several latents"
            raise ConfigError(
                f"model.path '{folder}' {fault}, which model.policy '{cls.family}' does not follow. Choose a model as "
                "'Lightricks/LTX-2' is."
            )
        return index

    @classmethod
    def check_options(cls, folder: Path, options: LTX2Options) -> None:
        config = read_json(folder / "connectors" / "config.json")
        for stream in ("video", "audio"):
            unit = config.get(f"{stream}_connector_num_learnable_registers")
            if unit and options.max_sequence_length % unit:
                nearest = max(1, options.max_sequence_length // unit) * unit
                raise ConfigError(
                    f"model.options.max_sequence_length is {options.max_sequence_length}, but the connectors of "
                    f"'{folder}' take multiples of {unit}. Set it to {nearest}."
                )


def _spectrograms(sounds: Tensor, config: Any) -> Tensor:
    """Return the (B, C, T, m) float32 log-mel spectrograms of (B, C, N) sounds: magnitudes on Slaney's scale, as
    ``AudioProcessor`` in ltx_core/model/audio_vae/ops.py of Lightricks/LTX-2 computes them."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    rate, window = config.sample_rate, window_function(_WINDOW, "hann")
    bins = (_WINDOW // 2 + 1, config.mel_bins, 0, rate / 2, rate)
    filters = mel_filter_bank(*bins, norm="slaney", mel_scale="slaney")
    options = {"mel_filters": filters, "mel_floor": 1e-5, "log_mel": "log"}
    waves = sounds.flatten(0, 1).cpu().numpy()
    spectrograms = [spectrogram(wave, window, _WINDOW, config.mel_hop_length, **options).T for wave in waves]
    return torch.from_numpy(np.stack(spectrograms)).unflatten(0, sounds.shape[:2])
