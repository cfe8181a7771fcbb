"""Critics of language models: the expected reward from each token on.
Legend: B rows, W positions, H hidden dims. Rows are padded on the right, as for the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowmill.models.library_loading import quiet_transformers
from flowmill.models.maths.shared_prompts import SharedPrompts
from flowmill.models.policies.base import Policy, PolicySettings
from flowmill.models.policies.language_classes import attention_of, check_causal, check_installed, shared_inputs, whole
from flowmill.models.policies.language_model_folders import hidden_size, load_language_config
from flowmill.models.policies.parts import Part
from flowmill.models.policies.trainable import Trainable
from flowmill.models.weights.lora import LoraSpec, insert_adapters, within
from flowmill.models.weights.pretrained_loading import load_pretrained

if TYPE_CHECKING:
    from flowmill.models.maths.row_tails import UsedOutputs

#: The trained module by its name.
CRITIC = "critic"


class ValueModel(nn.Module):
    """A head with one output per token, on its own backbone or on provided hidden states."""

    def __init__(self, backbone: Any, hidden: int, device: torch.device, *, log_probs: bool = False) -> None:
        """Start with a head of zeros, so that all values are 0.

        Args:
            backbone: a transformers model without a language head; None: hidden states are provided.
            hidden: width of hidden states.
            device: the head's device.
            log_probs: the backbone also reads the log-prob of each token, through a layer that starts at zero.
        """
        super().__init__()
        self.backbone = backbone
        self.inputs: Callable[[Any, Tensor], dict[str, Any]] = whole
        """Arguments of the backbone for whole rows of ids."""
        self.head = nn.Linear(hidden, 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.surprise = nn.Linear(1, hidden, bias=False, device=device) if log_probs else None
        if self.surprise is not None:
            nn.init.zeros_(self.surprise.weight)

    def insert_adapters(self, config: Any) -> None:
        """Insert adapters into the backbone, where the names of whole layers lack its own."""
        config.target_modules = {name.removeprefix("backbone.") for name in config.target_modules}
        insert_adapters(self.backbone, config)

    def forward(self, inputs: Mapping[str, Any], hidden: Tensor | None, log_probs: Tensor | None = None) -> Tensor:
        """Return (B, W) float32 values of the state after each token.

        Args:
            inputs: arguments of the backbone.
            hidden: (B, W, H) provided states, without a backbone.
            log_probs: (B, W) log-probs of the tokens, 0 for those of prompts. log(1 - log-prob), which grows slowly for
                tokens of almost no probability, is mapped to a vector that is added to the token's embedding.
        """
        if self.backbone is not None:
            with self._added(log_probs):
                hidden = self.backbone(**inputs, use_cache=False).last_hidden_state
        assert hidden is not None
        # Half precision would round away small differences between values.
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden.float())[..., 0]
        return values

    @contextmanager
    def _added(self, log_probs: Tensor | None) -> Iterator[None]:
        """Add vectors computed from log-probs to the embeddings of tokens, within the context."""
        layer = self.surprise
        if layer is None:
            yield
            return
        assert log_probs is not None
        added = layer(torch.log1p(-log_probs.float().clamp(max=0))[..., None].to(layer.weight.dtype))
        embeddings = self.backbone.get_input_embeddings()
        handle = embeddings.register_forward_hook(lambda module, args, output: output + added.to(output.dtype))
        try:
            yield
        finally:
            handle.remove()


class CriticLM(Policy):
    """A critic with a backbone like the policy's, or without one."""

    kind = "tokens"

    def __init__(self, settings: PolicySettings, model: ValueModel) -> None:
        super().__init__(settings)
        self.model = model

    @classmethod
    def load(
        cls, folder: Path, settings: PolicySettings, parts: frozenset[Part], options: Mapping[str, Any]
    ) -> CriticLM:
        """Load a backbone from a language model's folder and add a head of zeros; the option ``log_probs`` is that of
        ``ValueModel``."""
        from transformers import AutoModel

        quiet_transformers()
        config = load_language_config(folder, label="critic.path")
        attention = attention_of(AutoModel, config, settings.attention, label="critic.path")
        check_installed(attention)
        loading: dict[str, Any] = {"attn_implementation": attention, "dtype": settings.dtype}
        backbone = load_pretrained(AutoModel, folder, label="critic.path", use_safetensors=True, **loading)
        check_causal(folder, backbone, label="critic.path", draws=False)
        backbone = backbone.to(settings.device).eval()
        if settings.gradient_checkpointing:
            recompute_layers(backbone)
        return cls(settings, ValueModel(backbone, hidden_size(backbone.config), settings.device, **options))

    @classmethod
    def on_policy(cls, folder: Path, settings: PolicySettings) -> CriticLM:
        """Return a head without a backbone, for hidden states of the policy in a folder."""
        config = load_language_config(folder)
        return cls(settings, ValueModel(None, hidden_size(config), settings.device))

    @property
    def blocks(self) -> tuple[str, ...]:  # type: ignore[override]
        """The backbone's layers."""
        backbone = self.model.backbone
        names = () if backbone is None else block_lists(backbone)
        return tuple(f"backbone.{name}" for name in names if not within(name, self.untrained))

    @property
    def trained(self) -> dict[str, Any]:
        return {CRITIC: self.model}

    def trainable(self, lora: LoraSpec | None, *, seed: int) -> TrainableCritic:
        return TrainableCritic(self, lora, seed=seed)

    def save_lora(self, folder: Path) -> None:
        """Not implemented: critics are not exported."""
        raise NotImplementedError


class TrainableCritic(Trainable):
    """A trained critic."""

    policy: CriticLM

    def __init__(self, policy: CriticLM, lora: LoraSpec | None, *, seed: int) -> None:
        super().__init__(policy, None if policy.model.backbone is None else lora, seed=seed)
        policy.model.head.requires_grad_(True).float()
        if policy.model.surprise is not None:
            policy.model.surprise.requires_grad_(True).float()

    @property
    def reads_policy(self) -> bool:
        """True if it reads hidden states of the policy."""
        return self.policy.model.backbone is None

    @property
    def reads_log_probs(self) -> bool:
        """True if it reads log-probs of the tokens."""
        return self.policy.model.surprise is not None

    def _inputs(self, ids: Tensor, shared: SharedPrompts | None) -> Mapping[str, Any]:
        model = self.policy.model
        if shared is not None:
            return shared_inputs(shared, self.policy.settings.dtype)
        return model.inputs(model.backbone, ids)

    def values(
        self,
        ids: Tensor,
        hidden: Tensor | None = None,
        used: UsedOutputs = None,
        log_probs: Tensor | None = None,
    ) -> Tensor:
        """Return (B, W) float32 values of the state before each token, from the tokens before it; 0 at position 0.

        Args:
            ids: (B, W) int64, padded on the right with any token.
            hidden: (B, W, H) of the policy, for a critic without a backbone; it gets no gradient.
            used: rows packed by prompt are computed in this form, in which ``hidden`` is (G, L, H).
            log_probs: (B, W) float32 log-probs of sampled tokens, 0 elsewhere, for a critic that reads them.
        """
        dtype, model = self.policy.settings.dtype, self.policy.model
        shared = used if isinstance(used, SharedPrompts) else None
        with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            inputs: Mapping[str, Any] = {} if model.backbone is None else self._inputs(ids, shared)
            if log_probs is not None and shared is not None:
                log_probs = shared.packed(log_probs)
            outputs = model(inputs, None if hidden is None else hidden.detach(), log_probs)
        if shared is None:
            return nn.functional.pad(outputs[:, :-1], (1, 0))
        return shared.rows(nn.functional.pad(shared.tails(outputs[:, shared.output_positions])[:, :-1], (1, 0)))


def recompute_layers(model: Any) -> None:
    """Let a transformers model recompute its layers in the backward pass instead of keeping activations."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    let_recompute(model, True)


def let_recompute(model: Any, on: bool) -> None:
    """Turn recomputation of layers on or off: they recompute only in training mode, in which they drop a KV cache.
    Modules inside a layer stay in evaluation mode, so that dropout stays off."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            layer.training = on
            # Some layers apply dropout to their own outputs.
            for name in ("dropout", "activation_dropout"):
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)


def block_lists(model: Any) -> tuple[str, ...]:
    """Return the names of the lists that hold a transformers model's blocks, its ``_no_split_modules``."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    return tuple(name for name, part in lists if len(part) and type(part[0]).__name__ in kinds)
