"""Wan 2.1 and 2.2 text to video (WanPipeline): five-dimensional latents; 2.2 has one transformer per noise range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from configs.errors import ConfigError
from models.maths.guidance import guided
from models.maths.transitions import expand
from models.policies.clips import ClipPolicy
from models.policies.diffusion import Images, PipelineCall
from models.policies.euler_grid import EulerGridPolicy
from models.policies.pipeline import APART_ATTENTION, Modules, Rows
from models.policies.pipeline_configs import Fields
from models.policies.tokenization import Reader
from models.weights.lora_files import save_lora

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class WanOptions:
    """Options of the family."""

    max_sequence_length: int = 512
    """UMT5 tokens."""
    guidance_scale_2: float | None = None
    """Guidance of the second transformer (Wan 2.2); that of the first when absent."""
    flow_shift: float | None = None
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
        """Return ``prompt_embeds`` (B, L, D)."""
        embeds, _ = self.pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            device=self.settings.device,
            max_sequence_length=self.options.max_sequence_length,
        )
        return {"prompt_embeds": embeds}

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call the transformer of each row's noise range; the time argument runs from 0 to 1000."""
        if "transformer_2" not in modules:
            return self._one(modules["transformer"], latents, sigma, rows)
        early = self._early(sigma)
        if self.lockstep:
            return self._both(modules, latents, sigma, rows)
        # Read once, as each read synchronizes with the device.
        known = early.tolist()
        if all(known):
            return self._one(modules["transformer"], latents, sigma, rows)
        if not any(known):
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

    def decoded(self, latents: Tensor) -> Tensor:
        """Return decoded latents, (B, 3, F, H, W)."""
        return self.decode_standardized(latents)

    def save_lora(self, folder: Path) -> None:
        """Write one LoRA file per transformer.

        The second file is in a folder ``transformer_2``, for ``load_lora_weights(..., load_into_transformer_2=True)``.
        """
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

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments, with the guidance of the second transformer."""
        call = super().pipeline_call(steps, negative_prompt)
        arguments = {**call.arguments, "num_frames": self.settings.frames}
        if self.options.guidance_scale_2 is not None:
            arguments["guidance_scale_2"] = self.options.guidance_scale_2
        return replace(call, arguments=arguments)

    def _early(self, sigma: Tensor) -> Tensor:
        boundary = self.pipeline.config.boundary_ratio
        return torch.ones_like(sigma, dtype=torch.bool) if boundary is None else sigma * 1000 >= boundary * 1000

    def _one(self, module: nn.Module, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        return module(  # type: ignore[no-any-return]
            hidden_states=latents,
            timestep=sigma * 1000,
            encoder_hidden_states=rows["prompt_embeds"],
            return_dict=False,
        )[0]


class Wan22(Wan):
    """Adapter for WanPipeline with two transformers; both are trained."""

    family = "wan22"
    lora_targets = ATTENTION_AND_FFN
