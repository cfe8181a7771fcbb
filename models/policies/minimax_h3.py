"""MiniMax-H3 (MiniMaxH3ModularPipeline, text to clips with sound): one transformer over text, sound and clip.

A chain is one row of numbers: the latents of the clip, then those of both channels of the sound. In the pipeline the
sound has its own schedule, with a smaller shift; here it is mapped to the clip's schedule
(``models.maths.modality_chains``), so steps, solvers and losses need not distinguish them. Guidance is distilled into
the weights. The length of a text shifts the positions of all later tokens, so rows are computed one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from configs.errors import ConfigError
from models.devices import moved
from models.library_loading import read_json
from models.maths.modality_chains import Joined
from models.policies import VIDEO
from models.policies.attention_masks import with_content
from models.policies.clips import ClipPolicy
from models.policies.decoding import recompute_decoder
from models.policies.diffusion import DiffusionSettings, PipelineCall, SoundForm
from models.policies.modular import ModularPolicy
from models.policies.nan_checks import pixels, waves
from models.policies.parts import Part
from models.policies.pipeline import Modules, Rows, TextOptions, padded_text
from models.policies.pipeline_configs import Fields, check_scheduler, whole

if TYPE_CHECKING:
    from torch import Tensor

#: Number of text encoder layers before the hidden state that the pipeline reads; it must not be the last layer.
_TEXT_LAYER = 50
#: Cached token layouts, for a few prompts and their negatives: a layout of published size takes some MB.
_LAYOUTS = 8


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of the latents of a row."""

    clip: tuple[int, int, int, int]
    """Channels, frames, height and width of the clip."""
    sound: tuple[int, int]
    """Rows of the sound, one channel after the other, and their width."""
    sounds: int
    """Rows of one channel."""


class MiniMaxH3(ModularPolicy, ClipPolicy):
    """Adapter for MiniMaxH3ModularPipeline; latents are (B, D): those of the clip, then those of the sound, r-fold."""

    pipeline_name = "MiniMaxH3ModularPipeline"
    blocks_name = "MiniMaxH3Blocks"
    workflow: ClassVar[str | None] = "t2va"
    family = "minimax_h3"
    options_type = TextOptions
    options: TextOptions
    lengths = VIDEO["minimax_h3"]
    modality_names = ("video", "audio")
    text_parts = ("text_encoder", "tokenizer")
    decoder_names = ("vae", "audio_vae")
    missing_arguments = frozenset({"guidance_scale", "max_sequence_length"})
    required_parts: ClassVar[tuple[str, ...]] = ("audio_vae", "scheduler", "audio_scheduler")
    schedulers: ClassVar[Mapping[str, Fields]] = {"MiniMaxH3Scheduler": Fields(followed=frozenset({"shift"}))}
    size_unit = 32
    one_by_one = True
    blocks = ("token_refiner.refiner_blocks", "transformer_blocks")
    # Attention and feed-forward of every block.
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")

    @classmethod
    def check_folder(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        """Check the folder, the number of its text encoder's layers, and its clip length."""
        if settings.guidance_scale != 1:
            raise ConfigError(
                f"model.guidance_scale is {settings.guidance_scale:g}, but guidance is in the weights of "
                f"'{cls.family}', whose pipeline takes no scale. Set it to 1."
            )
        index = super().check_folder(folder, settings)
        with whole(folder):
            about = read_json(folder / "text_encoder" / "config.json").get("text_config", {})
            vae = read_json(folder / "vae" / "config.json")
        if (length := vae.get("clip_length", cls.lengths.every)) != cls.lengths.every:
            raise ConfigError(
                f"model.path '{folder}': its autoencoder encodes {length} frames at a time, but '{cls.family}' knows "
                f"clips of {cls.lengths}. Choose a model as 'MiniMaxAI/MiniMax-H3' is."
            )
        if about.get("num_hidden_layers", 0) <= _TEXT_LAYER:
            raise ConfigError(
                f"model.path '{folder}': its text encoder has {about.get('num_hidden_layers', 0)} layers, but the "
                f"pipeline reads the layers after layer {_TEXT_LAYER} and before the last. Take the whole text encoder."
            )
        return index

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        super()._check_scheduler(folder, index)
        if (index.get("audio_scheduler") or [None])[0] is not None:
            check_scheduler(folder, cls.family, index, cls.schedulers, part="audio_scheduler")

    @classmethod
    def components(cls, folder: Path, parts: frozenset[Part]) -> Mapping[str, Any]:
        from models.policies.dummy_components import TextProcessor

        return {"processor": TextProcessor(None) if Part.TEXT in parts else None}

    @classmethod
    def unit_of(cls, folder: Path) -> int:
        vae, denoiser = (read_json(folder / part / "config.json") for part in ("vae", "transformer"))
        pixels_wide = math.prod(vae.get("spatial_downsample_factors", (2, 2, 2, 2)))
        return int(pixels_wide * denoiser.get("patch_size", (1, 2, 2))[-1])

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D) and ``text_length`` (1,) int64, the tokens it has. Raises ConfigError if a
        prompt has no tokens, or more than ``max_sequence_length``; the pipeline does not truncate."""
        from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

        pipeline = self.pipeline
        tokens = pipeline.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        self.check_length(prompt, len(tokens), words=len(tokens))
        encoder = pipeline.text_encoder
        about = {"text_encoder_layer": _TEXT_LAYER, "device": self.settings.device, "dtype": encoder.dtype}
        embeds = get_qwen3vl_prompt_embeds(encoder, pipeline.processor, tokens, {}, **about)
        return padded_text(embeds, self.options.max_sequence_length)

    def check_length(self, prompt: str, tokens: int, *, words: int) -> None:
        """Check that a prompt has tokens of text, and no more in all than ``max_sequence_length``."""
        most = self.options.max_sequence_length
        if not words or tokens > most:
            raise ConfigError(
                f"model.options.max_sequence_length is {most}, but prompt {prompt!r} has {tokens} tokens, and the "
                f"pipeline reads all. {'Raise it, or shorten the prompt' if words else 'Write something'}."
            )

    def sigmas(self, steps: int) -> Tensor:
        """Return the clip's levels for T steps: 1, (T-1)/T, ..., 1/T, 0 after its shift; the pipeline counts the 0."""
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(steps + 1, device=self.settings.device)
        return scheduler.sigmas.clone()

    def modalities(self) -> Mapping[str, int]:
        shape = self._shape()
        clip, sound = math.prod(shape.clip), math.prod(shape.sound)
        return dict(zip(self.modality_names, (clip, sound), strict=True))

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, D) float32 noise; the clip's is drawn before the sound's."""
        from diffusers.utils.torch_utils import randn_tensor

        shape, about = self._shape(), {"device": self.settings.device, "dtype": torch.float32}
        rows = []
        for generator in generators:
            drawn = [randn_tensor(size, generator=generator, **about) for size in (shape.clip, shape.sound)]
            rows.append(torch.cat([each.flatten() for each in drawn]))
        return torch.stack(rows)

    def _predict(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Return velocities of the chain, (B, D) float32; the model gets the sound on its own schedule."""
        joined, (clip, sound) = self._joined, self.apart(latents)
        seen = torch.cat([clip, joined.own(sound, sigma)], dim=1)
        shown, heard = self.apart(super()._predict(modules, seen, sigma, rows).float())
        return torch.cat([shown, joined.velocity(sound, heard, sigma)], dim=1)

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

        shape, length, patch = self._shape(), int(rows["text_length"]), self.pipeline.patch_size
        clip, sound = self.apart(latents)
        blocks, given = self.given_frames(rows)
        positions, tags, heard, *indices = self._layouts(length, shape, blocks, latents.device)
        tokens = patchify_video_latents(clip.view(1, *shape.clip), patch)[None]
        times = [1 - sigma, 1 - self._joined.level(sigma)]
        if given is not None:
            packed = [patchify_video_latents(frame[None, :, None].to(tokens.dtype), patch) for frame in given]
            tokens = torch.cat([torch.cat(packed)[None], tokens], dim=1)
            times.append((1 - sigma).clamp(min=self.pipeline.keyframe_noise_aug))
        seen, sounded = modules["transformer"](
            hidden_states=tokens,
            audio_hidden_states=sound.view(1, *shape.sound),
            encoder_hidden_states=rows["prompt_embeds"][:, :length],
            # Text has no level; the pipeline uses the clip's.
            timestep=torch.cat(times),
            timestep_indices=heard,
            token_tags=tags,
            position_ids=positions,
            **dict(zip(("video_indices", "audio_indices", "text_indices"), indices, strict=True)),
            return_dict=False,
        )
        made = seen[:, -(math.prod(shape.clip[1:]) // math.prod(patch)) :]
        # The model predicts the velocity towards the data.
        return -torch.cat([_unpatchified(made, shape, patch).flatten(1), sounded.flatten(1)], dim=1)

    def given_frames(self, rows: Rows) -> tuple[tuple[tuple[int, int], ...], Tensor | None]:
        """Return where given frames begin and end in the text of one row, and their latents (R, C, h, w), or None."""
        return (), None

    @cached_property
    def _layouts(self) -> Callable[[int, _Shape, tuple[tuple[int, int], ...], torch.device], list[Tensor]]:
        """Cache of recent layouts: texts have many lengths, but the steps of a row follow each other."""
        return lru_cache(_LAYOUTS)(self._layout)

    def forget_tables(self) -> None:
        super().forget_tables()
        self.__dict__.pop("_layouts", None)

    def _layout(
        self, length: int, shape: _Shape, blocks: tuple[tuple[int, int], ...], device: torch.device
    ) -> list[Tensor]:
        """Return each token's position, tag and noise level, 1 for sound and 2 for given frames, and the indices of
        clip, sound and text tokens. ``blocks``: tokens of the text that show the first and the last frame."""
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

        pipeline = self.pipeline
        # It reads values of its own tensors, which must also exist while memory is traced.
        with with_content():
            text = torch.full((length,), pipeline.text_tag)
            for begin, end in blocks:
                text[begin:end] = pipeline.video_tag
            made = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
                text,
                *shape.clip[1:],
                shape.sounds,
                pipeline.patch_size,
                pipeline.audio_channels,
                pipeline.audio_tag,
                pipeline.video_tag,
                ("first", "last")[: len(blocks)],
            )
            positions, tags, *indices = made[:5]
            heard = (tags == pipeline.audio_tag).long()
            heard[length : length + made[5]] = 2
        return [moved(tensor, device) for tensor in (positions, tags, heard, *indices)]

    def clip_latents(self, latents: Tensor) -> Tensor:
        """Return the (B, C, f, h, w) latents of clips in the pipeline's format, from (B, D) final latents."""
        return self.apart(latents)[0].unflatten(1, self._shape().clip)

    def sound_latents(self, latents: Tensor) -> Tensor:
        """Return the (B, 2, c, L) latents of both channels in the pipeline's format, from (B, D) final latents."""
        shape = self._shape()
        rows: Tensor = self._joined.clean(self.apart(latents)[1]).unflatten(1, (-1, shape.sounds, shape.sound[1]))
        return rows.transpose(2, 3)

    def encoded(self, media: Tensor) -> Tensor:
        """Return the (B, D) latents of (B, 3, F, H, W) clips, the inverse of ``clip_latents``."""
        mean, std = _columns(media, self.pipeline.pixel_mean, self.pipeline.pixel_std)
        return self.encode_standardized((media / 2 + 0.5 - mean) / std).flatten(1)

    @property
    def sound_form(self) -> SoundForm:
        """Stereo, as long as the latents."""
        pipeline, length = self.pipeline, self._shape().sounds * self.pipeline.audio_vae.hop_length
        return SoundForm(rate=pipeline.audio_sampling_rate, channels=pipeline.audio_channels, length=length)

    @torch.no_grad()
    def encode_sounds(self, sounds: Tensor) -> Tensor:
        """Return the (B, D) latents of sounds, the inverse of ``sound_latents``; channels are encoded separately."""
        vae = self.pipeline.audio_vae
        found = vae.encode(sounds.flatten(0, 1)[:, None], return_dict=False)[0].mode()
        mean, std = _columns(found, vae.config.latents_mean, vae.config.latents_std)
        rows = ((found - mean) / std).unflatten(0, sounds.shape[:2]).transpose(2, 3)
        return rows.flatten(1).float() * self._joined.ratio

    def decoded(self, latents: Tensor) -> Tensor:
        """Return (B, 3, F, H, W) frames, about 0 to 1; the autoencoder's output has ImageNet's mean and std."""
        pipeline = self.pipeline
        frames = pipeline.vae.decode(_standing(self.clip_latents(latents), pipeline.vae.config), return_dict=False)[0]
        mean, std = _columns(frames, pipeline.pixel_mean, pipeline.pixel_std)
        return frames.float() * std + mean

    def images(self, decoded: Tensor) -> Tensor:
        """Return (B, F, H, W, 3) uint8 clips of (B, 3, F, H, W) frames in [0, 1]."""
        return pixels(decoded.clamp(0, 1)).permute(0, 2, 3, 4, 1).contiguous()

    def decode_smoothly(self, latents: Tensor) -> Tensor:
        """Return the autoencoder's frames, which are not clamped."""
        if self.settings.gradient_checkpointing:
            recompute_decoder(self.pipeline.vae)
        return self.decoded(latents).transpose(1, 2)

    @property
    def sound_rate(self) -> int:
        return int(self.pipeline.audio_sampling_rate)

    @torch.no_grad()
    def sounds(self, latents: Tensor) -> Tensor:
        """Return (B, N, 2) int16 sound of (B, D) final latents; channels are decoded separately."""
        vae, channels = self.pipeline.audio_vae, self.sound_latents(latents)
        made: Tensor = vae.decode(_standing(channels.flatten(0, 1), vae.config), return_dict=False)[0]
        return waves(made.view(len(latents), channels.shape[1], -1))

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        return replace(super().pipeline_call(steps, negative_prompt), guider=None)

    def more_arguments(self, steps: int) -> dict[str, Any]:
        """Return also the number of steps, which counts the level 0."""
        return {**super().more_arguments(steps), "num_inference_steps": steps + 1}

    @property
    def _joined(self) -> Joined:
        """The mapping of the sound's schedule to the clip's."""
        clip, sound = (part.config.shift for part in (self.pipeline.scheduler, self.pipeline.audio_scheduler))
        return Joined(clip / sound)

    def _shape(self) -> _Shape:
        from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
            audio_latent_num_frames,
            video_latent_num_frames,
        )

        pipeline, settings, config = self.pipeline, self.settings, self.pipeline.transformer.config
        chunk, side = (
            (pipeline.vae_frames_per_chunk, pipeline.vae_latents_per_chunk),
            pipeline.vae_spatial_compression_ratio,
        )
        frames, sounds = video_latent_num_frames(settings.frames, *chunk), audio_latent_num_frames(settings.frames)
        return _Shape(
            clip=(config.in_channels, frames, settings.height // side, settings.width // side),
            sound=(pipeline.audio_channels * sounds, config.audio_in_channels),
            sounds=sounds,
        )


def _unpatchified(rows: Tensor, shape: _Shape, patch: Sequence[int]) -> Tensor:
    """Return the (1, C, f, h, w) latents of a clip's tokens, as the pipeline does after denoising."""
    channels, *sides = shape.clip
    grid = [side // unit for side, unit in zip(sides, patch, strict=True)]
    return rows.reshape(-1, *grid, channels, *patch).permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(1, *shape.clip)


def _standing(latents: Tensor, config: Any) -> Tensor:
    """Return (B, C, ...) latents scaled and shifted by their channels' stds and means."""
    mean, std = _columns(latents, config.latents_mean, config.latents_std)
    return latents * std + mean


def _columns(like: Tensor, *values: Sequence[float]) -> Iterator[Tensor]:
    """Return lists of C float32 values in the rank of (B, C, ...) ``like``, (1, C, ...) each."""
    size = (1, -1, *[1] * (like.ndim - 2))
    return (torch.tensor(each, device=like.device).view(size) for each in values)
