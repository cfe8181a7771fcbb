"""FLUX.2 dev (Flux2Pipeline, embedded guidance) and FLUX.2 klein (Flux2KleinPipeline, two forwards)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from configs.errors import ConfigError
from models.policies.diffusion import DiffusionSettings, Images, PipelineCall
from models.policies.flux1 import Flux1
from models.policies.folders import Fields
from models.policies.pipeline import JOINT_ATTENTION, Modules, Rows, thousandths
from models.policies.reading import Reader

if TYPE_CHECKING:
    from torch import Tensor


def _conversation(tokenizer: Any, text: str) -> Any:
    from diffusers.pipelines.flux2.pipeline_flux2 import SYSTEM_MESSAGE, format_input

    messages = format_input(prompts=[text], system_message=SYSTEM_MESSAGE)
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=True, return_dict=True)
    return list(found["input_ids"][0])


def _question(tokenizer: Any, text: str) -> Any:
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)


class Flux2(Flux1):
    """Adapter for Flux2Pipeline; latents are packed, (B, tokens, 128)."""

    pipeline_name = "Flux2Pipeline"
    family = "flux2"
    text_parts = ("text_encoder", "tokenizer")
    readers = (Reader(tokenizer="tokenizer", written=_conversation),)
    unused_parts = ()
    # Flow-Factory's targets for FLUX.2: attention and feed-forwards of both streams, and the fused input projection of
    # the single-stream blocks. Its "attn.to_out.0" does not reach their output projection, which is "attn.to_out".
    lora_targets = (
        *JOINT_ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        "attn.to_qkv_mlp_proj",
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D) and ``text_ids`` (B, L, 4) int64."""
        embeds, ids = self.pipeline.encode_prompt(
            list(prompts), device=self.settings.device, max_sequence_length=self.options.max_sequence_length
        )
        return {"prompt_embeds": embeds, "text_ids": ids.long()}

    def shift_mu(self, steps: int) -> float:
        """Return FLUX.2's empirical shift, which depends on the number of steps too."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return float(compute_empirical_mu(image_seq_len=self.image_tokens(), num_steps=steps))

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call the transformer; its time argument runs from 0 to 1."""
        return modules["transformer"](  # type: ignore[no-any-return]
            hidden_states=latents,
            timestep=thousandths(sigma),
            guidance=self.embedded_guidance(latents),
            encoder_hidden_states=rows["prompt_embeds"],
            txt_ids=rows["text_ids"],
            img_ids=self._ids(len(latents)).to(latents.device),
            return_dict=False,
        )[0]

    def decoded(self, latents: Tensor) -> Tensor:
        """Return what the autoencoder makes of latents."""
        pipeline, vae = self.pipeline, self.pipeline.vae
        spatial = pipeline._unpack_latents_with_ids(latents, self._ids(len(latents)).to(latents.device))
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(spatial)
        std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).to(spatial)
        patches = pipeline._unpatchify_latents(spatial * std + mean)
        images: Tensor = vae.decode(patches.to(vae.dtype), return_dict=False)[0]
        return images

    def _ids(self, rows: int) -> Tensor:
        height, width = self._grid()
        ids: Tensor = self.pipeline._prepare_latent_ids(torch.zeros(1, 1, height, width))
        return ids.expand(rows, -1, -1)


class Flux2Klein(Flux2):
    """Adapter for Flux2KleinPipeline."""

    pipeline_name = "Flux2KleinPipeline"
    family = "flux2_klein"
    readers = (Reader(tokenizer="tokenizer", written=_question),)
    # Guidance of a distilled model is refused below.
    settings_read = Fields(followed=frozenset({"is_distilled"}))

    @classmethod
    def check_folder(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        """Check the folder, and that a distilled model is called without guidance, which its pipeline leaves out."""
        index = super().check_folder(folder, settings)
        if index.get("is_distilled") and settings.guidance_scale > 1:
            raise ConfigError(
                f"model.guidance_scale is {settings.guidance_scale:g}, but '{folder}' is distilled (is_distilled in "
                "its model_index.json), and its pipeline leaves guidance out. Set it to 1."
            )
        return index

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it takes no negative prompt but the empty one, its own."""
        call = super().pipeline_call(steps, None)
        if not negative_prompt:
            return call
        said = f"The run used the negative prompt {negative_prompt!r}; {self.pipeline_name} always uses an empty one."
        return replace(call, differences=(said,))
