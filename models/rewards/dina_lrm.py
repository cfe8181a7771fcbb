"""DiNa-LRM (github.com/HKUST-C4G/diffusion-rm): human preference, predicted from latents by the first blocks of SD3.5.

The latents are noised a little, as the reward was trained on noisy ones. The blocks' states of image and text are
modulated by the time's embedding, and a few queries attend to them. Latents are not decoded.

Legend: B samples, N tokens of an image, M of its prompt, D width of the blocks, Q queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from flowmill.configs.errors import ConfigError
from flowmill.configs.option_types import OpenShare
from flowmill.configs.path_types import FilePlace, FolderPlace, ModelPlace
from flowmill.configs.user_directories import user_path
from flowmill.models.devices import chosen_device, local_rank
from flowmill.models.memory.architectures import architecture_of, meta_denoiser, parameters
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.sd3 import SD3
from flowmill.models.rewards.base import Metadata, Needs, Scores
from flowmill.models.rewards.pretrained import downloaded
from flowmill.models.rewards.sizes import BYTES, Takes
from flowmill.models.rewards.weight_files import WeightsFile
from flowmill.models.weights.pretrained_loading import load_adapter_config

_NAME = "dina_lrm"
#: Side in pixels of the pipeline's images; none are generated here.
_SIZE = 512


@dataclass(kw_only=True)
class DinaLrm:
    """(s + 10) / 10 of the head's score s, on final latents of Stable Diffusion 3 or 3.5."""

    needs: ClassVar[Needs] = Needs(media="latents", accelerated=True, batch_size=8)

    adapter: FolderPlace
    """Folder of the backbone's adapters (``checkpoint/backbone_lora`` of liuhuohuo/DiNa-LRM-SD35M-12layers)."""
    head: FilePlace
    """Safetensors copy of the head (``checkpoint/rm_head.pt`` there)."""
    model: ModelPlace = "stabilityai/stable-diffusion-3.5-medium"
    """Folder or hub id of the pipeline whose model is its backbone."""
    revision: str | None = None
    """Commit, tag or branch of that pipeline."""
    taps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (4, 8, 12)
    """Blocks whose states the head reads, counted from 1; blocks after the last are not run."""
    noise: OpenShare = 0.4
    """Noise level added to the latents: 0.4 for generated images, 0.1 for images from files."""
    noise_seed: int = 0
    """Seed of that noise, which is the same for all samples."""
    max_sequence_length: int = 256
    """Tokens of the T5 encoder."""
    device: str = "auto"
    """Torch device, or auto."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of all weights."""

    def __post_init__(self) -> None:
        """Load pipeline, adapters and head; raise ConfigError if one does not fit the others, ValueError if the blocks
        are not in order."""
        if list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"taps is {self.taps}; it must name blocks in ascending order.")
        device = chosen_device(self.device, local_rank(), label=f"device of reward '{_NAME}'")
        settings = DiffusionSettings(dtype=getattr(torch, self.dtype), device=device, height=_SIZE, width=_SIZE)
        folder = downloaded(self.model, self.revision, reward=_NAME)
        options = {"max_sequence_length": self.max_sequence_length}
        self._policy = SD3.load(folder, settings, frozenset({Part.TEXT, Part.DENOISER}), options)
        transformer = self._policy.pipeline.transformer
        blocks = transformer.transformer_blocks
        if self.taps[-1] > len(blocks):
            raise ConfigError(
                f"reward '{_NAME}': option 'taps' names block {self.taps[-1]}, but '{self.model}' has {len(blocks)}."
            )
        if blocks[self.taps[-1] - 1].context_pre_only:
            raise ConfigError(
                f"reward '{_NAME}': option 'taps' names block {self.taps[-1]}, the last of '{self.model}', which has "
                "no states of the text. Name one before it."
            )
        transformer.transformer_blocks = blocks[: self.taps[-1]]
        self._backbone = self._adapted(transformer).to(device, settings.dtype).eval().requires_grad_(False)
        head = RewardHead(width=transformer.inner_dim, taps=len(self.taps))
        file = WeightsFile(reward=_NAME, file=self.head, option="head")
        file.fill(head, file.read())
        self._head = head.to(device, settings.dtype).eval().requires_grad_(False)
        # The reward was trained on the noise levels of the scheduler's training steps.
        scheduler = type(self._policy.pipeline.scheduler).from_config(self._policy.pipeline.scheduler.config)
        nearest = int((scheduler.sigmas - self.noise).abs().argmin())
        self._sigma, self._timestep = float(scheduler.sigmas[nearest]), float(scheduler.timesteps[nearest])

    @classmethod
    def takes(cls, options: Mapping[str, Any]) -> Takes | None:
        """Return the memory of the text encoders and the used blocks, or None if the pipeline is unknown yet."""
        architecture = architecture_of(str(options.get("model", cls.model)))
        if architecture is None:
            return None
        number = BYTES[str(options.get("dtype", cls.dtype))]
        run = replace(architecture, config={**architecture.config, "num_layers": options.get("taps", cls.taps)[-1]})
        return Takes(
            weights=(parameters(meta_denoiser(run)) + architecture.text_parameters) * number,
            row=architecture.text.row(int(options.get("max_sequence_length", cls.max_sequence_length)), number),
        )

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (C, h, w) float32 latents; raise ValueError if the latents are another model's."""
        latents = torch.from_numpy(np.array(media, np.float32))
        values: np.ndarray = self.differentiable(latents, prompts, metadata).cpu().numpy()
        return Scores(values)

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Return one score per (C, h, w) float32 latents, with a gradient unless autograd is off; raise ValueError if
        the latents are another model's."""
        settings, channels = self._policy.settings, self._policy.pipeline.transformer.config.in_channels
        latents = media.to(settings.device)
        if latents.ndim != 4 or latents.shape[1] != channels:
            raise ValueError(
                f"latents have shape {tuple(latents.shape[1:])}, but '{self.model}' has ({channels}, h, w). This "
                "reward belongs to policies of Stable Diffusion 3"
            )
        drawn = torch.Generator().manual_seed(self.noise_seed)
        noise = torch.randn(latents.shape[1:], generator=drawn).to(settings.device)
        noised = ((1 - self._sigma) * latents + self._sigma * noise).to(settings.dtype)
        time = torch.full((len(latents),), self._timestep, device=settings.device)
        encoded = self._policy.encode([self._policy.as_plain(prompt) for prompt in prompts])
        images, texts, embedded = self._states(noised, encoded["prompt_embeds"], encoded["pooled"], time)
        score: Tensor = self._head(images, texts, embedded).float()
        return (score + 10) / 10

    def _adapted(self, transformer: Any) -> Any:
        from peft import get_peft_model, set_peft_model_state_dict

        folder = user_path(self.adapter)
        file = WeightsFile(
            reward=_NAME,
            file=str(folder / "adapter_model.safetensors"),
            option="adapter",
            remedy="It must be the folder of adapters, as peft writes it, that was trained with this pipeline.",
        )
        stored = file.read()
        try:
            config = load_adapter_config(folder)
            model = get_peft_model(transformer, config)
            result = set_peft_model_state_dict(model, stored)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise file.unusable(str(error).splitlines()[0]) from None
        missing = [name for name in result.missing_keys if ".lora_" in name]
        wrong = [*result.unexpected_keys, *missing]
        if wrong:
            raise file.unusable(f"{len(wrong)} tensors do not fit the pipeline, {wrong[0]} first")
        return model.base_model.model

    def _states(
        self, latents: Tensor, prompt: Tensor, pooled: Tensor, time: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return states after each tap, of images (B, N, D) and texts (B, M, D), and the time's embedding (B, D)."""
        model: Any = self._backbone
        image, text = model.pos_embed(latents), model.context_embedder(prompt)
        embedded = model.time_text_embed(time, pooled)
        images, texts = [], []
        for number, block in enumerate(model.transformer_blocks, 1):
            text, image = block(hidden_states=image, encoder_hidden_states=text, temb=embedded)
            if number in self.taps:
                images.append(image)
                texts.append(text)
        return images, texts, embedded


class RewardHead(nn.Module):
    """Maps the states of some blocks to a score; parameter names are those of the published file."""

    def __init__(self, width: int, taps: int, *, queries: int = 4, heads: int = 8) -> None:
        super().__init__()
        narrow = width // 4
        self.layer_adapters_visual = nn.ModuleList(_Modulated(width, narrow) for _ in range(taps))
        self.layer_adapters_text = nn.ModuleList(_Modulated(width, narrow) for _ in range(taps))
        self.agg_visual = nn.Linear(taps * narrow, width)
        self.agg_text = nn.Linear(taps * narrow, width)
        self.query_tokens = nn.Parameter(torch.randn(1, queries, width) * 0.02)
        self.attn1 = _Attention(width, heads, both=True)
        self.attn2 = _Attention(width, heads, both=False)
        self.norm_ff = nn.RMSNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, width * 4), nn.GELU(), nn.Linear(width * 4, width))
        self.head = nn.Linear(width, 1)

    def forward(self, images: Sequence[Tensor], texts: Sequence[Tensor], time: Tensor) -> Tensor:
        """Return (B,) scores, from states (B, N, D) and (B, M, D) of every tap, and the time's embedding (B, D)."""
        image = self.agg_visual(self._joined(self.layer_adapters_visual, images, time))
        text = self.agg_text(self._joined(self.layer_adapters_text, texts, time))
        queries = self.attn1(self.query_tokens.expand(len(image), -1, -1), image, text)
        queries = self.attn2(queries, image)
        queries = queries + self.ff(self.norm_ff(queries))
        return self.head(queries).mean(dim=(1, 2))

    @staticmethod
    def _joined(layers: nn.ModuleList, states: Sequence[Tensor], time: Tensor) -> Tensor:
        return torch.cat([layer(each, time) for layer, each in zip(layers, states, strict=True)], dim=-1)


class _Modulated(nn.Module):
    """States of one block, scaled and shifted by the time, and narrowed (FiLM, arXiv 1709.07871)."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.layer_embed = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.cond_mlp = nn.Sequential(nn.Linear(width, width * 2), nn.SiLU(), nn.Linear(width * 2, width * 2))
        self.proj = nn.Linear(width, narrow)

    def forward(self, states: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.cond_mlp(time)[:, None].chunk(2, dim=-1)
        return self.proj(states * (1 + scale) + shift + self.layer_embed)


class _Attention(nn.Module):
    """Queries attend to tokens of the image; with ``both`` also of the text, and gates weight the values of both."""

    def __init__(self, width: int, heads: int, *, both: bool) -> None:
        super().__init__()
        self._heads, self._both = heads, both
        self.norm_q, self.norm_v = nn.RMSNorm(width), nn.RMSNorm(width)
        self.to_q = nn.Linear(width, width)
        self.to_k_vis, self.to_v_vis = nn.Linear(width, width), nn.Linear(width, width)
        if both:
            self.norm_t = nn.RMSNorm(width)
            self.to_k_text, self.to_v_text = nn.Linear(width, width), nn.Linear(width, width)
            self.gate_vis, self.gate_text = _gate(width), _gate(width)
        # A Sequential, to match the parameter name in the published file.
        self.to_out = nn.Sequential(nn.Linear(width, width))

    def forward(self, queries: Tensor, image: Tensor, text: Tensor | None = None) -> Tensor:
        query, image = self.to_q(self.norm_q(queries)), self.norm_v(image)
        values = self.to_v_vis(image)
        if text is None:
            output = self._attended(query, self.to_k_vis(image), values)
        else:
            text = self.norm_t(text)
            output = self._attended(query, self.to_k_vis(image), values * self.gate_vis(image).sigmoid())
            output = output + self._attended(
                query, self.to_k_text(text), self.to_v_text(text) * self.gate_text(text).sigmoid()
            )
        return queries + self.to_out(output)

    def _attended(self, *args: Tensor) -> Tensor:
        parts = [each.unflatten(-1, (self._heads, -1)).transpose(1, 2) for each in args]
        return scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


def _gate(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
