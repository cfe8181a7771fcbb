"""Causal language models of transformers (``AutoModelForCausalLM``), full weights or adapters.
Legend: B rows, W positions, V vocabulary. Rows are padded on the right, to widths of ``maths.tokens.WIDTH``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from flowmill.configs.registry import build
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import quiet_transformers
from flowmill.models.maths.shared_prompts import SharedPrompts
from flowmill.models.maths.tokens import log_probs_and_entropy, token_log_probs
from flowmill.models.policies.attention import LANGUAGE_BACKENDS
from flowmill.models.policies.base import Policy, PolicySettings
from flowmill.models.policies.critic_lm import (
    CRITIC,
    CriticLM,
    TrainableCritic,
    ValueModel,
    block_lists,
    let_recompute,
    recompute_layers,
)
from flowmill.models.policies.language_classes import (
    at,
    attention_of,
    cache_name,
    check_causal,
    check_installed,
    head_reads,
    shared_inputs,
    whole,
)
from flowmill.models.policies.language_model_folders import (
    CAUSAL,
    LanguageModels,
    check_critic,
    check_folder,
    context_length,
    end_tokens,
    hidden_size,
    load_language_config,
    load_tokenizer,
    read_generation_config,
)
from flowmill.models.policies.parts import Part
from flowmill.models.policies.trainable import Trainable
from flowmill.models.weights.lora import LoraSpec
from flowmill.models.weights.lora_files import save_peft
from flowmill.models.weights.lora_start import StartAdapter, peft_adapter
from flowmill.models.weights.pretrained_loading import auto_from_config, load_pretrained
from flowmill.models.weights.quantized import quantization_config
from flowmill.models.weights.stored_weights import StoredWeights, empty_model, on_meta

if TYPE_CHECKING:
    from flowmill.models.maths.row_tails import UsedOutputs
    from flowmill.models.policies.pictures import Pictures

#: The trained module by its name.
MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalOptions:
    """Options of ``model.options``; causal language models have none yet."""


class CausalLM(Policy):
    """One language model with its tokenizer."""

    kind = "tokens"
    options_type: ClassVar[type[Any]] = CausalOptions
    models: ClassVar[LanguageModels] = CAUSAL
    """The classes of its models."""
    attentions = LANGUAGE_BACKENDS
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    files: Sequence[Path] = ()
    """Files of its processor besides the tokenizer's."""

    def __init__(self, settings: PolicySettings, model: Any, tokenizer: Any) -> None:
        super().__init__(settings)
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def load(
        cls, folder: Path, settings: PolicySettings, parts: frozenset[Part], options: Mapping[str, Any]
    ) -> CausalLM:
        """Load the model and its tokenizer from a folder that ``save_pretrained`` wrote; raise ConfigError if the
        folder holds no causal language model, no tokenizer, or no safetensors."""
        quiet_transformers()
        build(cls.options_type, cls.models.policy, options, label="model.options of")
        check_folder(folder, cls.models)
        config, loader = load_language_config(folder), cls.models.loader()
        attention = attention_of(loader, config, settings.attention)
        check_installed(attention)
        called: dict[str, Any] = {"attn_implementation": attention}
        model: Any
        if settings.empty:
            model = empty_model(lambda: auto_from_config(loader, config, **called), settings.dtype)
            model.generation_config = read_generation_config(folder, model)
        else:
            loading = {"dtype": settings.dtype, "use_safetensors": True, **called}
            quantizer = None if settings.quantize is None else settings.quantize.name
            if quantizer is not None:
                arguments = (quantizer, "transformers", settings.dtype, settings.device)
                loading["quantization_config"] = quantization_config(*arguments)
            model = load_pretrained(loader, folder, label="model.path", **loading).to(settings.device)
        cls.check_model(folder, model)
        # Dropout would make the first ratios differ from 1.
        model.eval()
        if settings.gradient_checkpointing:
            recompute_layers(model)
        policy = cls(settings, model, load_tokenizer(folder))
        policy.stored = {MODEL: StoredWeights.of(folder, model)}
        if settings.empty:
            policy.stored[MODEL].untie(model)
        return policy

    @classmethod
    def check_model(cls, folder: Path, model: Any) -> None:
        """Check that a folder's model can be sampled and trained; raise ConfigError."""
        check_causal(folder, model)

    @classmethod
    def check_run(cls, config: RunConfig) -> None:
        """Check the settings of a run that depend on the family; raise ConfigError."""
        build(cls.options_type, cls.models.policy, config.model.options, label="model.options of")

    @classmethod
    def pictures_in(cls, folder: Path) -> Pictures | None:
        """Return the images of prompts for the model in a folder; None: it reads texts alone. Raises ConfigError if the
        folder has no processor of images."""
        return None

    @classmethod
    def load_critic(
        cls,
        folder: Path,
        settings: PolicySettings,
        *,
        own: bool,
        lora: LoraSpec | None,
        seed: int,
        like: Path | None = None,
        log_probs: bool = False,
    ) -> TrainableCritic:
        """Load a critic with its own backbone, or a head on the policy's hidden states; see ``Policy``."""
        if like is not None and like != folder:
            check_critic(folder, like)
        check_folder(folder, cls.models)
        options = {"log_probs": log_probs}
        critic = CriticLM.load(folder, settings, frozenset(), options) if own else CriticLM.on_policy(folder, settings)
        cls.prepare_critic(critic, folder if like is None else like)
        return critic.trainable(lora, seed=seed)

    @classmethod
    def prepare_critic(cls, critic: CriticLM, folder: Path) -> None:
        """Make a critic, before it is trained, read rows as the policy in a folder does."""

    @classmethod
    def trained_on_meta(cls, folder: Path, *, critic: bool = False) -> Mapping[str, Any]:
        """Return the language model, or a critic's value model, on the meta device."""
        from transformers import AutoModel

        config = load_language_config(folder)
        if not critic:
            model = on_meta(lambda: auto_from_config(cls.models.loader(), config))
            cls.check_model(folder, model)
            return {MODEL: model}
        backbone = on_meta(lambda: auto_from_config(AutoModel, config))
        check_causal(folder, backbone, label="critic.path")
        return {CRITIC: ValueModel(backbone, hidden_size(config), torch.device("meta"))}

    @classmethod
    def read_adapter(cls, path: str) -> StartAdapter:
        """Read a folder that peft's ``save_pretrained`` wrote."""
        return peft_adapter(path, MODEL)

    @property
    def blocks(self) -> tuple[str, ...]:  # type: ignore[override]
        """The model's layers."""
        return block_lists(self.model)

    @property
    def trained(self) -> dict[str, Any]:
        return {MODEL: self.model}

    def trainable(self, lora: LoraSpec | None, *, seed: int) -> TrainableLM:
        return TrainableLM(self, lora, seed=seed)

    def save_lora(self, folder: Path) -> None:
        """Write the adapter for peft's ``PeftModel.from_pretrained``."""
        save_peft(folder, self.model)
        self.model.generation_config.save_pretrained(folder)

    def save_reader(self, folder: Path) -> None:
        """Write the reader of prompts: the tokenizer, and the files of the processor."""
        self.tokenizer.save_pretrained(folder)
        for file in self.files:
            (folder / file.name).write_bytes(file.read_bytes())

    @property
    def facts(self) -> dict[str, str]:
        return {"attention": str(self.model.config._attn_implementation)}

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a completion: those of the tokenizer and of the model's configuration files."""
        config = self.model.config
        generation = getattr(self.model, "generation_config", None)
        return frozenset(end_tokens(self.tokenizer, generation, config, config.get_text_config(decoder=True)))

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and completion; None if the config names no limit."""
        return context_length(self.model.config)

    @property
    def vocabulary(self) -> int:
        """Exclusive upper bound of token ids."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def first_position(self, prompt: Sequence[int]) -> int:
        """Return the position of the first token after a prompt."""
        return len(prompt)

    def next_logits(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the next token's logits; see ``maths.generation.Forward``."""
        with self._autocast(), self._keeping_cache():
            inputs = self.inputs(self.model, ids, mask, positions) if cache is None else at(self.model, ids, positions)
            inputs[name := cache_name()] = cache
            out = self.model(attention_mask=mask, use_cache=True, logits_to_keep=1, **inputs)
        return self.allowed(out.logits)[:, -1], out[name]

    def inputs(self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> dict[str, Any]:
        """Return the arguments of a model for rows from their first token on: whole ones, padded on the right, or with
        a mask and (B, W) positions, padded on the left."""
        return whole(model, ids) if positions is None else at(model, ids, positions)

    def allowed(self, logits: Tensor) -> Tensor:
        """Return logits (..., V), changed in place, so that no token is drawn that cannot follow in a text."""
        return logits

    def forward(
        self,
        ids: Tensor,
        modules: Mapping[str, nn.Module] | None = None,
        *,
        hidden: bool = False,
        used: UsedOutputs = None,
    ) -> Any:
        """Return the model's output for whole rows.

        Tokens do not attend to later ones, so padding on the right needs no mask. Attention without a mask has faster
        kernels, and uses the same kernels whether or not all rows of a batch have the same length.

        Args:
            ids: (B, W) int64, padded on the right with any token.
            modules: modules to call instead of the policy's own (a reference).
            hidden: also return ``hidden_states``; the logits are computed from the last, (B, W, H).
            used: the outputs whose logits are used; None: all. Of rows packed by prompt these are (G, 1 + N C, V) at
                their ``output_positions``; of tails they are (B, K, V), or (B, W, V) of a model without a head.
        """
        model = self.model if modules is None else modules[MODEL]
        with self._autocast(), head_reads(model, used):
            if isinstance(used, SharedPrompts):
                inputs = {**shared_inputs(used, self.settings.dtype), "logits_to_keep": used.output_positions}
            else:
                inputs = self.inputs(model, ids, None, None)
            out = model(**inputs, use_cache=False, output_hidden_states=hidden)
        self.allowed(out.logits)
        return out

    @contextmanager
    def _keeping_cache(self) -> Iterator[None]:
        """Turn off recomputation of layers inside the context: recomputed layers drop the cache."""
        if not self.settings.gradient_checkpointing:
            yield
            return
        let_recompute(self.model, False)
        try:
            yield
        finally:
            let_recompute(self.model, True)

    def _autocast(self) -> torch.autocast:
        dtype = self.settings.dtype
        return torch.autocast(self.settings.device.type, dtype, enabled=dtype != torch.float32)


class TrainableLM(Trainable):
    """A trained language model, and the log-probs of its reference. With ``used`` values of other tokens are 0."""

    policy: CausalLM

    def log_probs(self, ids: Tensor, temperature: float, used: UsedOutputs = None) -> tuple[Tensor, Tensor]:
        """Return the (B, W) log-probs of tokens, with gradient, and entropies, without; see ``CausalLM.forward``."""
        logits = self.policy.forward(ids, used=used).logits
        return self._of_tokens(log_probs_and_entropy, logits, ids, temperature, used)

    def log_probs_and_hidden(
        self, ids: Tensor, temperature: float, used: UsedOutputs = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``log_probs`` and the (B, W, H) last hidden states, without gradient; (G, L, H) of packed rows."""
        out = self.policy.forward(ids, hidden=True, used=used)
        values = self._of_tokens(log_probs_and_entropy, out.logits, ids, temperature, used)
        return *values, out.hidden_states[-1].detach()

    @torch.no_grad()
    def reference_log_probs(self, ids: Tensor, temperature: float, used: UsedOutputs = None) -> Tensor:
        """Return the reference's (B, W) log-probs: its adapters or none, or the frozen copy. Raises RuntimeError if
        full weights are trained and no reference was set."""
        if self.lora is not None:
            with self.reference_adapters():
                logits = self.policy.forward(ids, used=used).logits
        else:
            reference = self.frozen["reference"]
            if not reference:
                raise RuntimeError("set_reference() must be called before reference_log_probs()")
            logits = self.policy.forward(ids, reference, used=used).logits
        return self._of_tokens(lambda *args: (token_log_probs(*args),), logits, ids, temperature, used)[0]

    def _of_tokens(self, function: Any, logits: Tensor, ids: Tensor, temperature: float, used: UsedOutputs) -> Any:
        """Return the results of a function of logits and ids, (B, W) each."""
        if used is None:
            return function(logits, ids, temperature)
        return tuple(map(used.rows, function(used.tails(logits), used.tail_ids, temperature)))
