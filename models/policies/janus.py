"""Janus and Janus-Pro (arXiv 2501.17811) of transformers: images from tokens, after the tokens of a prompt.

A row holds both: token k of the codebook of images has the id V + k. Guidance (arXiv 2207.12598) draws from the
distribution of the logits u + s (c - u): c follows the prompt, u a prompt of which the first and the last token are
left. The log-probs of sampling, training and the reference are those of that distribution, at both branches' current
weights, so they belong to the drawn tokens. Log-probs of c alone would belong to another policy: ratios and KLs of the
drawn tokens would then be biased at any scale but 1.

Legend: B rows, W positions, V vocabulary of texts, K codebook, N tokens of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.guidance import guided
from flowmill.models.policies.base import PolicySettings, common_settings
from flowmill.models.policies.causal_lm import MODEL, CausalLM, TrainableLM
from flowmill.models.policies.critic_lm import block_lists
from flowmill.models.policies.language_classes import cache_name
from flowmill.models.policies.language_model_folders import Frame, LanguageModels, frame_of
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pictures import load_image_processor, processor_files
from flowmill.models.policies.vision_lm import NEVER
from flowmill.models.weights.lora import LoraSpec, within

if TYPE_CHECKING:
    from flowmill.models.maths.row_tails import UsedOutputs

JANUS = LanguageModels(
    policy="janus",
    auto="AutoModelForImageTextToText",
    label="a Janus model (JanusForConditionalGeneration)",
    names=("JanusForConditionalGeneration",),
    reader="AutoProcessor",
    task="any-to-any",
    draws=True,
    generation=("generation_kwargs",),
)
#: Parts that read images, code them, and write texts: drawing uses the decoder of the second alone.
_UNUSED = ("vision_model", "aligner", "vqmodel", "lm_head")
#: The smallest scale with which transformers draws images: its loop fails without a second branch.
LEAST_SCALE = 1.000001


@dataclass(frozen=True, slots=True, kw_only=True)
class JanusSettings(PolicySettings):
    """Settings for loading and running a policy."""

    guidance_scale: float = 1.0
    """s; 1: none, and one forward."""


class Janus(CausalLM):
    """One Janus model; its texts are prompts."""

    kind = "image_tokens"
    models = JANUS
    settings: JanusSettings
    frame = Frame(0, 0, 0)

    def __init__(self, settings: JanusSettings, model: Any, tokenizer: Any) -> None:
        super().__init__(settings, model, tokenizer)
        self.untrained = _UNUSED
        # Errors of u + s (c - u), at most: s of one branch and s - 1 of the other.
        self.rounding = 2 * max(1.0, settings.guidance_scale) - 1
        self._guides = True
        self.processor: Any = None
        """Makes images of the decoder's output; None: the policy draws none."""

    @classmethod
    def settings_for(cls, config: RunConfig, *, dtype: torch.dtype, device: torch.device, empty: bool) -> JanusSettings:
        values = common_settings(config, dtype=dtype, device=device, empty=empty)
        return JanusSettings(**values, guidance_scale=config.model.guidance_scale)

    @classmethod
    def load(cls, folder: Path, settings: PolicySettings, parts: frozenset[Part], options: Mapping[str, Any]) -> Janus:
        """Load the model, its tokenizer and its processor of images; see ``CausalLM``."""
        policy = super().load(folder, settings, parts, options)
        assert isinstance(policy, Janus)
        policy.frame = frame_of(folder)
        policy.processor, policy.files = load_image_processor(folder), processor_files(folder)
        return policy

    @classmethod
    def untrained_parts(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return _UNUSED

    @classmethod
    def check_run(cls, config: RunConfig) -> None:
        super().check_run(config)
        tokens = config.rollout.tokens
        refused = {
            "optimize.shared_prompts is true": config.optimize.shared_prompts,
            "rollout.tokens.engine is set": tokens is not None and tokens.engine.name != "local",
            "execution.strategy is 'fsdp'": config.execution.strategy == "fsdp",
            "rollout.tokens.on_overlong is 'cut_left'": tokens is not None and tokens.on_overlong == "cut_left",
        }
        for setting, is_set in refused.items():
            if is_set:
                raise ConfigError(f"{setting}, which model.policy 'janus' does not support. Remove it.")

    @classmethod
    def load_critic(cls, folder: Path, settings: Any, **options: Any) -> Any:
        return super(CausalLM, cls).load_critic(folder, settings, **options)

    def trainable(self, lora: LoraSpec | None, *, seed: int) -> TrainableJanus:
        return TrainableJanus(self, lora, seed=seed)

    @property
    def blocks(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for name in block_lists(self.model) if not within(name, _UNUSED))

    @property
    def entered(self) -> list[nn.Module]:
        return [self.model.base_model.generation_aligner, self.model.base_model.generation_head]

    @property
    def eos(self) -> frozenset[int]:
        """No token: an image has N."""
        return frozenset()

    @property
    def texts(self) -> int:
        """V."""
        return super().vocabulary

    @property
    def vocabulary(self) -> int:
        return self.texts + int(self.model.config.vq_config.num_embeddings)

    def next_logits(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the next token's logits, (B, V + K); see ``maths.generation.Forward``."""
        with self._autocast(), self._keeping_cache():
            logits, updated = self._logits(
                self.model, ids, positions, mask=mask, cache=None if cache is None else cache.both, last=True
            )
        padded = torch.nn.functional.pad(logits[:, -1].float(), (self.texts, 0), value=NEVER)
        return padded, _Cache(updated, len(ids))

    def forward(
        self,
        ids: Tensor,
        modules: Mapping[str, nn.Module] | None = None,
        *,
        hidden: bool = False,
        used: UsedOutputs = None,
    ) -> Any:
        """Return (B, W, K) ``logits`` of the codebook for whole rows; see ``CausalLM``."""
        model = self.model if modules is None else modules[MODEL]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with self._autocast():
            return SimpleNamespace(logits=self._logits(model, ids, positions)[0])

    def _logits(
        self,
        model: Any,
        ids: Tensor,
        positions: Tensor,
        *,
        mask: Tensor | None = None,
        cache: Any = None,
        last: bool = False,
    ) -> tuple[Tensor, Any]:
        """Return the codebook's logits, at all positions or the last, and the model's cache of both branches."""
        guides = self._guides and self.settings.guidance_scale > 1
        rows = torch.cat([ids, self._blank(ids)]) if guides else ids
        copies = len(rows) // len(ids)
        name = cache_name()
        # The language model's own head, over V texts, is not used: one position of it is computed.
        out = model(
            inputs_embeds=self._embedded(model, rows),
            attention_mask=None if mask is None else mask.repeat(copies, 1),
            position_ids=positions if len(positions) == 1 else positions.repeat(copies, 1),
            use_cache=mask is not None,
            output_hidden_states=True,
            logits_to_keep=1,
            **{name: cache},
        )
        states = out.hidden_states[-1][:, -1:] if last else out.hidden_states[-1]
        logits = model.base_model.generation_head(states)
        if guides:
            # In half precision the scale would multiply one more rounding.
            followed, blank = logits.float().chunk(2)
            logits = guided(blank, followed, self.settings.guidance_scale)
        return logits, out.get(name)

    @contextmanager
    def without_guidance(self) -> Iterator[None]:
        """Compute logits of c alone inside the context: those of provided images, which no guidance drew."""
        self._guides = False
        try:
            yield
        finally:
            self._guides = True

    def _blank(self, ids: Tensor) -> Tensor:
        """Return ids (B, W) without their prompts."""
        first, last, blank = self.frame
        return ids.masked_fill((ids < self.texts) & (ids != first) & (ids != last), blank)

    def _embedded(self, model: Any, ids: Tensor) -> Tensor:
        """Return (B, W, H) embeddings of texts and of images."""
        words = model.get_input_embeddings()(ids.clamp(max=self.texts - 1))
        codes = model.prepare_embeddings_for_image_generation((ids - self.texts).clamp(min=0))
        return torch.where((ids >= self.texts)[..., None], codes.to(words.dtype), words)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Return ids (B, N) of (B, H, W, 3) uint8 images: the nearest codes by direction, since codes are decoded with
        length 1. As in the authors' VectorQuantizer; transformers' ``encode`` is equal if the codes have length 1."""
        coder = self.model.base_model.vqmodel
        pixels = self.processor(list(images.cpu().numpy()), return_tensors="pt")["pixel_values"]
        states = coder.quant_conv(coder.encoder(pixels.to(self.settings.device, self.settings.dtype)))
        codes = torch.nn.functional.normalize(coder.quantize.embedding.weight.float(), dim=-1)
        nearest: Tensor = (states.float().flatten(2).transpose(1, 2) @ codes.T).argmax(-1)
        return nearest + self.texts

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """Return (B, H, W, 3) uint8 images of ids (B, N), as the model's processor makes them."""
        pixels = self.model.decode_image_tokens(ids - self.texts).permute(0, 3, 1, 2).float().cpu().numpy()
        images = np.stack(self.processor.postprocess(list(pixels))["pixel_values"])
        return torch.from_numpy(images).permute(0, 2, 3, 1)


class TrainableJanus(TrainableLM):
    """A trained Janus model, and the log-probs of its reference."""

    policy: Janus

    def _of_tokens(
        self,
        function: Callable[[Tensor, Tensor, float], tuple[Tensor, ...]],
        logits: Tensor,
        ids: Tensor,
        temperature: float,
        used: UsedOutputs,
    ) -> Any:
        # Values at tokens of prompts are not used.
        return function(logits, ids - self.policy.texts, temperature)


class _Cache:
    """The cache of both branches of B rows."""

    def __init__(self, both: Any, rows: int) -> None:
        self.both, self.layers, self._rows = both, both.layers, rows

    def reorder_cache(self, rows: Tensor) -> None:
        """Keep rows, in an order, of both branches."""
        copies = self.layers[0].keys.shape[0] // self._rows
        self.both.reorder_cache(torch.cat([rows + self._rows * branch for branch in range(copies)]))
        self._rows = len(rows)
