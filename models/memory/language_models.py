"""Sizes and activation memory of causal language models, from their configs alone.

As for denoisers the real layers run on fake tensors, see ``models.memory.activation_tracing``; models with two and
three layers are built, and the difference gives the memory of each further layer.

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

from models.maths.tokens import draw
from models.memory.activation_tracing import extrapolated, fake_module, forget_gradient, traced
from models.policies.causal_lm import CausalLM
from models.policies.critic_lm import CriticLM, ValueModel, recompute_layers
from models.policies.language_classes import attention_of
from models.policies.language_model_folders import hidden_size
from models.policies.pictures import KEPT_BYTES, Inputs
from models.weights.pretrained_loading import auto_from_config
from models.weights.stored_weights import empty_model

if TYPE_CHECKING:
    from models.policies.base import PolicySettings
    from models.policies.causal_lm import TrainableLM
    from models.policies.critic_lm import TrainableCritic
    from models.policies.trainable import Trainable
    from models.weights.lora import LoraSpec


#: Measures of models, which keep their results.
_KNOWN: dict[tuple[Any, ...], TextFootprints] = {}


class NotMeasuredError(Exception):
    """A model's memory is not known without its weights; the message is a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Bytes of the generation loop without weights."""

    cache: int
    """Keys and values of all tokens but the last."""
    work: int
    """Further bytes of the first or last forward."""


class TextFootprints:
    """Measures a language model, and its critic; results are kept."""

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
        kept = prompt + new - 1
        cache = self._of_layers(self._cached, rows, kept)
        last = self._of_layers(self._go_on, rows, kept)
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

    def _peak(self, work: Callable[..., None], *given: int, gradient: bool = False) -> int:
        """Return the peak memory of some work with policy and critic."""

        def measure(layers: int, *given: int) -> int:
            policy, fakes = self._policy(layers)
            critic = self._critic(layers, fakes)
            with traced(fakes) as memory, torch.set_grad_enabled(gradient):
                work(policy, critic, *given)
            return memory.peak

        return self._of_layers(measure, *given, name=work.__name__)

    def _of_layers(self, measure: Callable[..., int], *given: int, name: str | None = None) -> int:
        """Return a measure of the whole model, from models with a few layers; each is traced once.

        Raises:
            NotMeasuredError: the class needs the values of tensors, for example to choose experts.
        """
        key: tuple[str | int, ...] = (name or measure.__name__, *given)
        every = [("layers", range(int(self._config.get_text_config(decoder=True).num_hidden_layers)))]
        try:
            if key not in self._results:
                self._results[key] = extrapolated(lambda kept: measure(len(kept), *given), every)
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
        made = copy.deepcopy(self._config)
        texts = made.get_text_config(decoder=True)
        texts.num_hidden_layers = layers
        if getattr(texts, "layer_types", None):
            texts.layer_types = texts.layer_types[:layers]
        return made

    def _policy(self, layers: int) -> tuple[TrainableLM, FakeTensorMode]:
        """Return a policy of some layers on fake tensors."""
        config, fakes = self._shortened(layers), FakeTensorMode(allow_non_fake_inputs=True)
        loader = self._family.models.loader()
        attention = attention_of(loader, config, self._settings.attention)
        made_of = partial(auto_from_config, loader, config, attn_implementation=attention)
        model: Any = empty_model(made_of, self._settings.dtype).eval()
        if self._settings.gradient_checkpointing:
            recompute_layers(model)
        with torch.device("meta"):
            # Drawing the initial weights of adapters costs nothing there.
            made = self._family(self._settings, model, None).trainable(self._lora, seed=0)
        _make_fake(made, model, fakes)
        return made, fakes

    def _critic(self, layers: int, fakes: FakeTensorMode) -> TrainableCritic | None:
        from transformers import AutoModel

        settings, config = self._critic_settings, self._shortened(layers)
        if settings is None:
            return None
        backbone: Any = None
        if self._own:
            attention = attention_of(AutoModel, config, settings.attention, label="critic.path")
            made_of = partial(auto_from_config, AutoModel, config, attn_implementation=attention)
            backbone = empty_model(made_of, settings.dtype).eval()
            if settings.gradient_checkpointing:
                recompute_layers(backbone)
        with torch.device("meta"):
            head = ValueModel(backbone, hidden_size(config), torch.device("meta"))
            made = CriticLM(settings, head).trainable(self._lora, seed=0)
        _make_fake(made, head, fakes)
        return made


def encoding_bytes(config: Any, inputs: Inputs, *, trained: bool) -> int:
    """Return the estimated bytes of encoding an image, and of kept features: eight vectors of the width of the encoder
    and two of its inner layers per patch, of one layer, or of all where they are trained. The layers cannot be traced
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
    return int(patches * (8 * width + 2 * inner) * 4 * (layers if trained else 1)) + (0 if trained else KEPT_BYTES)


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
    if key not in _KNOWN:
        _KNOWN[key] = TextFootprints(config, settings, lora, critic=critic, own=own, family=family)
    return _KNOWN[key]


def _make_fake(made: Trainable, module: Any, fakes: FakeTensorMode) -> None:
    """Make a trained module's tensors fake, and drop gradients as soon as they are complete."""
    fake_module(module, fakes)
    if made.merged is not None:
        with fakes:
            # Sums of weights and adapters are weights.
            made.merged.refresh()
    for parameter in made.parameters():
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
    held = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]


def _cache_bytes(cache: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _filled_tensors(cache))
