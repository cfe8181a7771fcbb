"""Sizes and activation memory of causal language models, from their configs alone.

As for denoisers the real layers run on fake tensors, see ``flowmill.models.memory.activation_tracing``; models with
two and three layers are built, and the difference gives the memory of each further layer.

Legend: B rows, W positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flowmill.models.maths.tokens import draw
from flowmill.models.memory.activation_tracing import extrapolated, fake_module, forget_gradient, traced
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.critic_lm import CriticLM, ValueModel, recompute_layers
from flowmill.models.policies.language_classes import attention_of
from flowmill.models.policies.language_model_folders import hidden_size
from flowmill.models.policies.pictures import CACHED_BYTES, Inputs
from flowmill.models.weights.pretrained_loading import auto_from_config
from flowmill.models.weights.stored_weights import empty_model

if TYPE_CHECKING:
    from flowmill.models.policies.base import PolicySettings
    from flowmill.models.policies.causal_lm import TrainableLM
    from flowmill.models.policies.critic_lm import TrainableCritic
    from flowmill.models.policies.trainable import Trainable
    from flowmill.models.weights.lora import LoraSpec


#: Measures of models, which keep their results.
_FOOTPRINTS: dict[tuple[Any, ...], TextFootprints] = {}


class NotMeasuredError(Exception):
    """A model's memory is unknown without its weights; the message is a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Bytes of the generation loop without weights."""

    cache: int
    """Keys and values of all tokens but the last."""
    work: int
    """Further bytes of the first or last forward."""


class TextFootprints:
    """Measures a language model, and its critic; results are cached."""

    def __init__(
        self,
        config: Any,
        settings: PolicySettings,
        lora: LoraSpec | None,
        *,
        critic: PolicySettings | None,
        own: bool,
        family: type[CausalLM] = CausalLM,
    ) -> None:
        """Bind to a model.

        Args:
            config: config of transformers.
            settings: settings of the policy.
            lora: adapters; None: all weights are trained.
            critic: settings of the critic; None: there is none.
            own: the critic has its own backbone.
            family: class of the policy.
        """
        self._family = family
        self._config, self._settings, self._lora = config, settings, lora
        self._results: dict[tuple[str | int, ...], int] = {}
        self._critic_settings, self._own = critic, own

    def sampling(self, rows: int, *, prompt: int, new: int) -> Sampled:
        """Return the memory of sampling.

        Args:
            rows: B.
            prompt: width that all prompts are padded to.
            new: maximum tokens of a completion.
        """
        width = prompt + new - 1
        cache = self._of_layers(self._cached, rows, width)
        last = self._of_layers(self._go_on, rows, width)
        first = self._peak(_begin, rows, prompt)
        return Sampled(cache=cache, work=max(0, max(first, last) - cache))

    def scoring(self, rows: int, width: int) -> int:
        """Return the memory of log-probs of whole rows, without gradient."""
        return self._peak(_score, rows, width)

    def drawing(self, rows: int) -> int | None:
        """Return the memory of decoding images from their tokens; None: the family draws none."""
        if not self._family.models.draws:
            return None
        return self._peak(_draw, rows, int(self._config.vision_config.num_image_tokens))

    def valuing(self, rows: int, width: int, *, reference: bool) -> int:
        """Return the memory of values of whole rows, and of the base model's log-probs if needed."""
        return self._peak(_value, rows, width, reference)

    def training(self, rows: int, width: int, *, reference: bool) -> int:
        """Return the memory of a forward and backward of whole rows, without weights and their gradients.

        Args:
            rows: B.
            width: W.
            reference: log-probs of the base model are computed in between.
        """
        return self._peak(_train, rows, width, reference, gradient=True)

    def training_of_critic(self, rows: int, width: int) -> int:
        """Return the memory of a forward and backward of a critic with its own backbone."""
        return self._peak(_train_critic, rows, width, gradient=True)

    def _peak(self, work: Callable[..., None], *sizes: int, gradient: bool = False) -> int:
        """Return the peak memory of some work with policy and critic."""

        def measure(layers: int, *sizes: int) -> int:
            policy, fakes = self._policy(layers)
            critic = self._critic(layers, fakes)
            with traced(fakes) as memory, torch.set_grad_enabled(gradient):
                work(policy, critic, *sizes)
            return memory.peak

        return self._of_layers(measure, *sizes, name=work.__name__)

    def _of_layers(self, measure: Callable[..., int], *sizes: int, name: str | None = None) -> int:
        """Return a measure of the whole model, from models with a few layers; each is traced once.

        Raises:
            NotMeasuredError: the class needs the values of tensors, for example to choose experts.
        """
        key: tuple[str | int, ...] = (name or measure.__name__, *sizes)
        every = [("layers", range(int(self._config.get_text_config(decoder=True).num_hidden_layers)))]
        try:
            if key not in self._results:
                self._results[key] = extrapolated(lambda blocks: measure(len(blocks), *sizes), every)
        except Exception as error:  # layers of any class, on fake tensors
            kind = self._config.model_type
            raise NotMeasuredError(
                f"memory: not estimated, as layers of a '{kind}' cannot be carried out without numbers."
            ) from error
        return self._results[key]

    def _cached(self, layers: int, rows: int, width: int) -> int:
        """Return the memory of the cache of ``width`` tokens."""
        return _cache_bytes(self._filled(layers, rows, width)[1])

    def _go_on(self, layers: int, rows: int, width: int) -> int:
        """Return the memory of the forward of token ``width`` with a cache, including the new cache."""
        policy, cache, fakes = self._filled(layers, rows, width - 1)
        with traced(fakes) as memory, torch.no_grad():
            logits, _ = _forward(policy, rows, width, cache)
            draw(logits, torch.zeros(rows, dtype=torch.float64), 1.0)
        return memory.peak

    def _filled(self, layers: int, rows: int, width: int) -> tuple[TrainableLM, Any, FakeTensorMode]:
        """Return the policy, and a cache of ``width`` tokens."""
        policy, fakes = self._policy(layers)
        with fakes, torch.no_grad():
            return policy, _forward(policy, rows, max(1, width), None)[1], fakes

    def _shortened(self, layers: int) -> Any:
        config = copy.deepcopy(self._config)
        texts = config.get_text_config(decoder=True)
        texts.num_hidden_layers = layers
        if getattr(texts, "layer_types", None):
            texts.layer_types = texts.layer_types[:layers]
        return config

    def _policy(self, layers: int) -> tuple[TrainableLM, FakeTensorMode]:
        """Return a policy of some layers on fake tensors."""
        config, fakes = self._shortened(layers), FakeTensorMode(allow_non_fake_inputs=True)
        loader = self._family.models.loader()
        attention = attention_of(loader, config, self._settings.attention)
        build = partial(auto_from_config, loader, config, attn_implementation=attention)
        model: Any = empty_model(build, self._settings.dtype).eval()
        if self._settings.gradient_checkpointing:
            recompute_layers(model)
        with torch.device("meta"):
            # Drawing the initial weights of adapters costs nothing there.
            trainable = self._family(self._settings, model, None).trainable(self._lora, seed=0)
        _make_fake(trainable, model, fakes)
        return trainable, fakes

    def _critic(self, layers: int, fakes: FakeTensorMode) -> TrainableCritic | None:
        from transformers import AutoModel

        settings, config = self._critic_settings, self._shortened(layers)
        if settings is None:
            return None
        backbone: Any = None
        if self._own:
            attention = attention_of(AutoModel, config, settings.attention, label="critic.path")
            build = partial(auto_from_config, AutoModel, config, attn_implementation=attention)
            backbone = empty_model(build, settings.dtype).eval()
            if settings.gradient_checkpointing:
                recompute_layers(backbone)
        with torch.device("meta"):
            head = ValueModel(backbone, hidden_size(config), torch.device("meta"))
            trainable = CriticLM(settings, head).trainable(self._lora, seed=0)
        _make_fake(trainable, head, fakes)
        return trainable


def encoding_bytes(config: Any, inputs: Inputs, *, trained: bool) -> int:
    """Return the estimated bytes of encoding an image, and of cached features: eight vectors of the width of the
    encoder and two of its inner layers per patch, of one layer, or of all where they are trained. The layers cannot be
    traced without numbers, as their attention depends on the size of the image.

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
    return int(patches * (8 * width + 2 * inner) * 4 * (layers if trained else 1)) + (0 if trained else CACHED_BYTES)


def text_footprints(
    config: Any,
    settings: PolicySettings,
    lora: LoraSpec | None,
    *,
    critic: PolicySettings | None,
    own: bool,
    family: type[CausalLM] = CausalLM,
) -> TextFootprints:
    """Return the measures of a model, the same object for equal arguments; see ``TextFootprints``."""
    key = (repr(config), settings, lora, critic, own, family)
    if key not in _FOOTPRINTS:
        _FOOTPRINTS[key] = TextFootprints(config, settings, lora, critic=critic, own=own, family=family)
    return _FOOTPRINTS[key]


def _make_fake(trainable: Trainable, module: Any, fakes: FakeTensorMode) -> None:
    """Make a trained module's tensors fake, and drop gradients as soon as they are complete."""
    fake_module(module, fakes)
    if trainable.merged is not None:
        with fakes:
            # Sums of weights and adapters are weights.
            trainable.merged.refresh()
    for parameter in trainable.parameters():
        parameter.register_post_accumulate_grad_hook(forget_gradient)


def _rows(rows: int, width: int) -> torch.Tensor:
    """Return (B, W) ids."""
    return torch.zeros(rows, width, dtype=torch.int64)


def _begin(policy: TrainableLM, critic: TrainableCritic | None, rows: int, width: int) -> None:
    """Compute the first forward with its cache."""
    _forward(policy, rows, width, None)


def _score(policy: TrainableLM, critic: TrainableCritic | None, rows: int, width: int) -> None:
    policy.log_probs(_rows(rows, width), 1.0)


def _draw(policy: TrainableLM, critic: TrainableCritic | None, rows: int, tokens: int) -> None:
    policy.policy.model.decode_image_tokens(_rows(rows, tokens))


def _value(policy: TrainableLM, critic: TrainableCritic | None, rows: int, width: int, reference: int) -> None:
    ids = _rows(rows, width)
    if critic is not None:
        hidden = policy.log_probs_and_hidden(ids, 1.0)[2] if critic.reads_policy else None
        critic.values(ids, hidden)
    if reference:
        policy.policy.logits(ids).float().log_softmax(-1)


def _train(policy: TrainableLM, critic: TrainableCritic | None, rows: int, width: int, reference: int) -> None:
    ids, hidden = _rows(rows, width), None
    if critic is not None and critic.reads_policy:
        log_probs, _, hidden = policy.log_probs_and_hidden(ids, 1.0)
    else:
        log_probs, _ = policy.log_probs(ids, 1.0)
    loss = log_probs.square().mean()
    if critic is not None:
        loss = loss + critic.values(ids, hidden).square().mean()
    if reference:
        with torch.no_grad():
            policy.policy.logits(ids).float().log_softmax(-1)
    loss.backward()  # type: ignore[no-untyped-call]


def _train_critic(policy: TrainableLM, critic: TrainableCritic | None, rows: int, width: int) -> None:
    assert critic is not None
    critic.values(_rows(rows, width)).square().mean().backward()  # type: ignore[no-untyped-call]


def _forward(policy: TrainableLM, rows: int, width: int, cache: Any) -> tuple[torch.Tensor, Any]:
    """Return the next token's logits after ``width`` tokens; all are new without a cache, else the last one."""
    new = width if cache is None else 1
    ids, mask = torch.zeros(rows, new, dtype=torch.int64), torch.zeros(rows, width, dtype=torch.int64)
    return policy.policy.next_logits(ids, mask, ids, cache)


def _filled_tensors(cache: Any) -> list[torch.Tensor]:
    # Decoders of encoder-decoders have a second cache, which is not used here.
    layers = getattr(cache, "self_attention_cache", cache).layers
    values = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def _cache_bytes(cache: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _filled_tensors(cache))
