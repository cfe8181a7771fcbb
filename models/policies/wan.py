"""Wan 2.1 and 2.2 text to video (WanPipeline): five-dimensional latents; 2.2 has one transformer per noise range.

Wan 2.2 TI2V-5B has one transformer and a time input for each token. Without a start image all tokens have the same
noise level, so steps and log-probs work as in other families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.extras import require_extra
from flowmill.models.library_loading import read_json
from flowmill.models.maths.guidance import guided
from flowmill.models.maths.transitions import expand
from flowmill.models.policies.clips import ClipPolicy
from flowmill.models.policies.diffusion import Images
from flowmill.models.policies.euler_grid import EulerGridPolicy
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import APART_ATTENTION, Modules, Rows
from flowmill.models.policies.pipeline_configs import Fields
from flowmill.models.policies.tokenization import Reader
from flowmill.models.weights.lora_files import save_lora


@dataclass(frozen=True, slots=True, kw_only=True)
class WanOptions:
    """Options of the family."""

    max_sequence_length: PositiveInt = 512
    """UMT5 tokens."""
    guidance_scale_2: NonNegativeFloat | None = None
    """Guidance of the second transformer (Wan 2.2); that of the first when absent."""
    flow_shift: NonNegativeFloat | None = None
    """Shift of the noise levels; the pipeline's when absent."""


def _cleaned(tokenizer: Any, text: str) -> str:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean
    from diffusers.utils import is_ftfy_available

    return str(prompt_clean(text)) if is_ftfy_available() else text


#: Flow-Factory's targets for Wan 2.2 and for image to video: attention and feed-forward.
ATTENTION_AND_FFN = (*APART_ATTENTION, "ffn.net.0.proj", "ffn.net.2")


class Wan(EulerGridPolicy, ClipPolicy):
    """Adapter for WanPipeline; latents are (B, 16, f, h, w)."""

    pipeline_name = "WanPipeline"
    family = "wan21"
    options_type = WanOptions
    options: WanOptions
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    readers = (Reader(tokenizer="tokenizer", written=_cleaned),)
    denoiser_names: ClassVar[tuple[str, ...]] = ("transformer", "transformer_2")
    expands_timesteps: ClassVar[bool] = False
    """Each token has its own time input, as in Wan 2.2 TI2V."""
    settings_read = Fields(followed=frozenset({"boundary_ratio", "expand_timesteps"}))
    blocks = ("blocks",)
    # Flow-GRPO's targets for Wan 2.1: self- and cross-attention.
    lora_targets: ClassVar[tuple[str, ...]] = APART_ATTENTION

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D), and the rows of ``encode_images`` if prompts come with images; raise
        ConfigError if the package that pipelines of images clean prompts with is not installed."""
        with_images = Part.VAE in self.encoding_parts
        if with_images:
            require_extra("video", "ftfy", label=f"model.policy '{self.family}'")
        rows = self.encode_images(prompts, images or ()) if with_images else {}
        embeds, _ = self.pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            device=self.settings.device,
            max_sequence_length=self.options.max_sequence_length,
        )
        return {"prompt_embeds": embeds, **rows}

    def encode_images(self, prompts: Sequence[str], images: Images) -> dict[str, Tensor]:
        """Return the rows of B prompts' images; tasks that take images override it."""
        raise NotImplementedError(f"{type(self).__name__} takes no images")

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, C, f, h, w) float32 noise; the methods of some tasks' pipelines also need images."""
        from diffusers.utils.torch_utils import randn_tensor

        pipeline, settings = self.pipeline, self.settings
        frames = (settings.frames - 1) // pipeline.vae_scale_factor_temporal + 1
        height, width = (size // pipeline.vae_scale_factor_spatial for size in (settings.height, settings.width))
        shape = (len(generators), pipeline.vae.config.z_dim, frames, height, width)
        return randn_tensor(shape, list(generators), settings.device, torch.float32)

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call the transformer of each row's noise range; the time argument runs from 0 to 1000."""
        if "transformer_2" not in modules:
            return self._one(modules["transformer"], latents, sigma, rows)
        early = self._early(sigma)
        if self.lockstep:
            return self._both(modules, latents, sigma, rows)
        # Read once, as each read synchronizes with the device.
        is_early = early.tolist()
        if all(is_early):
            return self._one(modules["transformer"], latents, sigma, rows)
        if not any(is_early):
            return self._one(modules["transformer_2"], latents, sigma, rows)
        result = torch.empty_like(latents)
        for name, chosen in (("transformer", early), ("transformer_2", ~early)):
            part = {key: tensor[chosen] for key, tensor in rows.items()}
            result[chosen] = self._one(modules[name], latents[chosen], sigma[chosen], part).to(result.dtype)
        return result

    def _both(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call both transformers with the rows of their noise range, or with one row of the other without effect."""
        early, result = self._early(sigma), torch.zeros_like(latents)
        for name, chosen in (("transformer", early), ("transformer_2", ~early)):
            used = chosen if bool(chosen.any()) else torch.arange(len(sigma), device=sigma.device) == 0
            part = {key: tensor[used] for key, tensor in rows.items()}
            predicted = self._one(modules[name], latents[used], sigma[used], part).to(result.dtype)
            counts = expand(chosen[used].to(predicted.dtype), predicted)
            result = result.index_add(0, used.nonzero().flatten(), predicted * counts)
        return result

    def guide(self, negative: Tensor, positive: Tensor, sigma: Tensor, latents: Tensor) -> Tensor:
        """Return the guided prediction; each noise range has its own scale."""
        first, second = self.settings.guidance_scale, self.options.guidance_scale_2
        if second is None or second == first:
            return guided(negative, positive, first)
        early = expand(self._early(sigma), positive)
        return torch.where(early, guided(negative, positive, first), guided(negative, positive, second))

    def save_lora(self, folder: Path) -> None:
        """Write one LoRA file per transformer. The second file is in a folder ``transformer_2``, for
        ``load_lora_weights(..., load_into_transformer_2=True)``."""
        for name, module in self.denoisers.items():
            # The pipeline's loader knows one name; its argument selects the transformer.
            save_lora(self.pipeline_name, folder if name == "transformer" else folder / name, "transformer", module)

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        super()._check_scheduler(folder, index)
        expands = bool(index.get("expand_timesteps"))
        if expands and not cls.expands_timesteps:
            raise ConfigError(
                f"model.path '{folder}' is a Wan 2.2 TI2V model, which takes a time for each token "
                f"(expand_timesteps); model.policy '{cls.family}' gives it one. Set model.policy to 'wan22_ti2v', "
                "which makes clips of text, or 'wan22_ti2v_i2v', of images."
            )
        if cls.expands_timesteps and not expands:
            raise ConfigError(
                f"model.path '{folder}' is no Wan 2.2 TI2V model (its model_index.json has no expand_timesteps), which "
                f"model.policy '{cls.family}' is for. Choose the policy of that Wan."
            )

    def more_arguments(self, steps: int) -> dict[str, Any]:
        scale = self.options.guidance_scale_2
        return {**super().more_arguments(steps), **({} if scale is None else {"guidance_scale_2": scale})}

    def _early(self, sigma: Tensor) -> Tensor:
        boundary = self.pipeline.config.boundary_ratio
        return torch.ones_like(sigma, dtype=torch.bool) if boundary is None else sigma * 1000 >= boundary * 1000

    def _one(self, module: nn.Module, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        text, inputs = rows["prompt_embeds"], self.inputs(latents, sigma, rows)
        return module(encoder_hidden_states=text, return_dict=False, **inputs)[0]

    def inputs(self, latents: Tensor, sigma: Tensor, rows: Rows) -> dict[str, Any]:
        """Return the transformer's arguments other than the text, for the task."""
        return {"hidden_states": latents, "timestep": sigma * 1000}


class Wan22(Wan):
    """Adapter for WanPipeline with two transformers; both are trained."""

    family = "wan22"
    lora_targets = ATTENTION_AND_FFN


class Wan22TI2V(Wan):
    """Adapter for WanPipeline with a time input per token; latents are (B, 48, f, h, w)."""

    family = "wan22_ti2v"
    expands_timesteps = True
    size_unit = 32

    def inputs(self, latents: Tensor, sigma: Tensor, rows: Rows) -> dict[str, Any]:
        frames, height, width = latents.shape[2:]
        # The pipeline uses every second latent of a mask, which is all ones without an image.
        tokens = frames * ((height + 1) // 2) * ((width + 1) // 2)
        return {"hidden_states": latents, "timestep": (sigma * 1000)[:, None].expand(-1, tokens)}

    @classmethod
    def unit_of(cls, folder: Path) -> int:
        vae, transformer = (read_json(folder / part / "config.json") for part in ("vae", "transformer"))
        return int(vae["scale_factor_spatial"] * transformer["patch_size"][1])
