"""Memory of batches of causal language models and their critics, traced from their configs alone.

Legend: B rows, W positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flowmill.models.maths.row_tails import RowTails
from flowmill.models.maths.tokens import draw
from flowmill.models.memory.published import Transformer
from flowmill.models.memory.tracing import Blocks, PeakMemory, Traced, Tracer, make_fake
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.critic_lm import CriticLM, ValueModel, recompute_layers
from flowmill.models.policies.language_classes import attention_of
from flowmill.models.policies.language_model_folders import hidden_size
from flowmill.models.policies.pictures import CACHED_BYTES, Inputs
from flowmill.models.weights.pretrained_loading import auto_from_config
from flowmill.models.weights.stored_weights import empty_model

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flowmill.models.policies.base import PolicySettings
    from flowmill.models.policies.causal_lm import TrainableLM
    from flowmill.models.policies.critic_lm import TrainableCritic
    from flowmill.models.weights.lora import LoraSpec

#: A policy, and its critic if it has one.
Models = tuple["TrainableLM", "TrainableCritic | None"]


class LanguageModelMemory(NamedTuple):
    """A language model, and its critic."""

    config: Any
    """Config of transformers."""
    settings: PolicySettings
    lora: LoraSpec | None
    """Adapters; None: all weights are trained."""
    critic: PolicySettings | None = None
    """Settings of the critic; None: there is none."""
    own: bool = False
    """The critic has its own backbone."""
    family: type[CausalLM] = CausalLM
    """Class of the policy."""

    def trace(self, work: Callable[..., None], *sizes: int, gradient: bool = False) -> Traced:
        """Return the memory of some work of this module with the models, without weights and their gradients; see
        ``Tracer``."""
        layers = range(int(self.config.get_text_config(decoder=True).num_hidden_layers))
        tracer = Tracer(label=self.config.model_type, key=repr(self), build=self._built, groups=[("layers", layers)])
        return tracer(work, *sizes, gradient=gradient)

    def _built(self, layers: Blocks, fakes: FakeTensorMode) -> Models:
        config = copy.deepcopy(self.config)
        texts = config.get_text_config(decoder=True)
        texts.num_hidden_layers = len(layers)
        if getattr(texts, "layer_types", None):
            texts.layer_types = texts.layer_types[: len(layers)]
        model = _model(self.family.models.loader(), config, self.settings)
        with torch.device("meta"):
            # Drawing the initial weights of adapters costs nothing there.
            policy = self.family(self.settings, model, None).trainable(self.lora, seed=0)
        make_fake(policy, fakes)
        return policy, None if self.critic is None else self._critic(config, self.critic, fakes)

    def _critic(self, config: Any, settings: PolicySettings, fakes: FakeTensorMode) -> TrainableCritic:
        from transformers import AutoModel

        backbone = _model(AutoModel, config, settings, label="critic.path") if self.own else None
        with torch.device("meta"):
            head = ValueModel(backbone, hidden_size(config), torch.device("meta"))
            critic = CriticLM(settings, head).trainable(self.lora, seed=0)
        make_fake(critic, fakes)
        return critic


def _model(loader: Any, config: Any, settings: PolicySettings, **label: str) -> Any:
    attention = attention_of(loader, config, settings.attention, **label)
    build = partial(auto_from_config, loader, config, attn_implementation=attention)
    model = empty_model(build, settings.dtype).eval()
    if settings.gradient_checkpointing:
        recompute_layers(model)
    return model


def encoding_bytes(config: Any, inputs: Inputs, *, trained: bool) -> int:
    """Return an upper bound of the bytes of encoding an image, and of cached features. The layers cannot be traced
    without numbers, as their attention depends on the size of the image.

    Args:
        config: config of transformers.
        inputs: the inputs of the encoder for the image.
        trained: the encoder is trained.
    """
    vision, pixels = config.vision_config, inputs["pixel_values"]
    side = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    patches = pixels.shape[0] if pixels.ndim == 2 else pixels.numel() // (3 * side**2)
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or int(vision.mlp_ratio * width)
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    encoder = Transformer(width=width, inner=inner, layers=layers)
    return encoder.followed(patches, 4) or 0 if trained else encoder.row(patches, 4) + CACHED_BYTES


def begin(models: Models, memory: PeakMemory, rows: int, width: int) -> None:
    """Compute the next token's logits after (B, W) tokens, with their cache."""
    _forward(models[0], rows, width, None)


def go_on(models: Models, memory: PeakMemory, rows: int, width: int) -> None:
    """Draw the token after (B, W) cached ones; the cache is retained."""
    _, cache = _forward(models[0], rows, width, None)
    memory.peak = memory.retained = memory.now
    logits, _ = _forward(models[0], rows, width + 1, cache)
    draw(logits, torch.zeros(rows, dtype=torch.float64), 1.0)


def score(models: Models, memory: PeakMemory, rows: int, width: int, tail: int) -> None:
    """Compute the log-probs of the last ``tail`` tokens of (B, W) rows."""
    ids = _rows(rows, width)
    models[0].log_probs(ids, 1.0, _tails(ids, tail))


def draw_images(models: Models, memory: PeakMemory, rows: int, tokens: int) -> None:
    """Decode images from their tokens."""
    models[0].policy.model.decode_image_tokens(_rows(rows, tokens))


def value(models: Models, memory: PeakMemory, rows: int, width: int, tail: int, reference: int) -> None:
    """Compute values of (B, W) rows, and the base model's log-probs of the last ``tail`` tokens if needed."""
    policy, critic = models
    ids = _rows(rows, width)
    if critic is not None:
        hidden = policy.log_probs_and_hidden(ids, 1.0, _tails(ids, tail))[2] if critic.reads_policy else None
        critic.values(ids, hidden)
    if reference:
        policy.policy.forward(ids, used=_tails(ids, tail)).logits.float().log_softmax(-1)


def train(models: Models, memory: PeakMemory, rows: int, width: int, tail: int, reference: int) -> None:
    """Carry out a forward and backward of the last ``tail`` tokens of (B, W) rows, with log-probs of the base model in
    between if needed."""
    policy, critic = models
    ids, hidden = _rows(rows, width), None
    if critic is not None and critic.reads_policy:
        log_probs, _, hidden = policy.log_probs_and_hidden(ids, 1.0, _tails(ids, tail))
    else:
        log_probs, _ = policy.log_probs(ids, 1.0, _tails(ids, tail))
    loss = log_probs.square().mean()
    if critic is not None:
        loss = loss + critic.values(ids, hidden).square().mean()
    if reference:
        with torch.no_grad():
            policy.policy.forward(ids, used=_tails(ids, tail)).logits.float().log_softmax(-1)
    loss.backward()  # type: ignore[no-untyped-call]


def train_critic(models: Models, memory: PeakMemory, rows: int, width: int) -> None:
    """Carry out a forward and backward of a critic with its own backbone."""
    assert models[1] is not None
    models[1].values(_rows(rows, width)).square().mean().backward()  # type: ignore[no-untyped-call]


def _rows(rows: int, width: int) -> torch.Tensor:
    """Return (B, W) ids."""
    return torch.zeros(rows, width, dtype=torch.int64)


def _tails(ids: torch.Tensor, tail: int) -> RowTails | None:
    """Return the tails of rows whose last ``tail`` tokens are chosen."""
    rows, width = ids.shape
    return RowTails.of(ids, [width - tail] * rows, [width] * rows)


def _forward(policy: TrainableLM, rows: int, width: int, cache: Any) -> tuple[torch.Tensor, Any]:
    """Return the next token's logits after ``width`` tokens; all are new without a cache, else the last one."""
    new = width if cache is None else 1
    ids, mask = torch.zeros(rows, new, dtype=torch.int64), torch.zeros(rows, width, dtype=torch.int64)
    return policy.policy.next_logits(ids, mask, ids, cache)
