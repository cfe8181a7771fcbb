"""Inputs and layers of fitted rewards: a backbone turns samples into numbers, and its head of layers into a score.

A backbone is fixed, but for adapters of its model; ``flowmill reward fit`` trains these and the head. A new one is one
class here and one line in ``BACKBONES``.

Legend: B rows, H W image pixels, C h w latents, D embedding, K outputs of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import hash_text
from flowmill.configs.model import LoraSection
from flowmill.models.policies.language_model_folders import end_tokens
from flowmill.models.rewards.clip import ClipEmbeddings
from flowmill.models.rewards.device_placement import settled
from flowmill.models.rewards.pretrained import Pretrained
from flowmill.models.rewards.text import SequenceClassification
from flowmill.models.text.continuations import appended_ends, part_ids
from flowmill.models.text.control_tokens import as_texts
from flowmill.models.weights.lora import LoraSpec, add_lora, block_layers

Judged = Literal["images", "latents", "texts"]
"""Media that people judged."""


class RewardBackbone(Protocol):
    """Turns samples into the inputs of a head."""

    judged: ClassVar[Judged]
    """Media it takes."""

    @property
    def network(self) -> nn.Module | None:
        """Its pretrained model, on which adapters can be trained; None: it has none."""

    def inputs(self, media: Sequence[np.ndarray], prompts: Sequence[str]) -> Tensor:
        """Return (B, ...) float32 inputs of B samples as stored, and their prompts; adapters alone get a gradient."""

    def smooth(self, media: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the same with a gradient, of (B, 3, H, W) images of about 0 to 1, or of (B, ...) latents."""

    def head(self, inputs: Tensor) -> nn.Sequential:
        """Return new layers for such inputs, with K outputs, drawn from torch's generator."""

    def shares(self, prompts: Sequence[str]) -> Tensor:
        """Return (B, K) float32: the shares of the K outputs in the score; that of the first is 1."""


@dataclass(kw_only=True)
class _OneOutput:
    """A backbone whose inputs hold the prompt."""

    def shares(self, prompts: Sequence[str]) -> Tensor:
        """Return (B, 1) ones."""
        return torch.ones(len(prompts), 1)

    def smooth(self, media: Tensor, prompts: Sequence[str]) -> Tensor:
        """Raise TypeError: texts have no gradient; backbones of images override it."""
        raise TypeError("it was fitted on texts, which have no gradient")


@dataclass(kw_only=True)
class _Prompted:
    """A backbone whose inputs are the sample alone: the head is bilinear in a sample and the features of its prompt.

    Output 0 is for all prompts, output k for those with feature k. The score is output 0 plus the sum of those of the
    prompt's F features over the root of F. The output of a feature that training did not see is 0.
    """

    prompt: Literal["none", "words", "characters"] = "none"
    """Features of the prompt: none, its words, or its characters with their positions."""
    features: PositiveInt = 1024
    """Number of features, to which words or characters are hashed."""

    @property
    def network(self) -> None:
        """Return None: all layers are those of the head."""

    def shares(self, prompts: Sequence[str]) -> Tensor:
        """Return (B, 1 + features), or (B, 1) ones if the prompt has no features."""
        features = torch.zeros(len(prompts), 1 if self.prompt == "none" else 1 + self.features)
        features[:, 0] = 1
        for row, prompt in enumerate(prompts if self.prompt != "none" else ()):
            words = prompt.lower().split()
            parts = words if self.prompt == "words" else [f"{place} {each}" for place, each in enumerate(prompt)]
            for part in parts:
                features[row, 1 + int(hash_text(part), 16) % self.features] += 1 / len(parts) ** 0.5
        return features


@dataclass(kw_only=True)
class Pixels(_Prompted):
    """Pixels, averaged down to a small size: a convolutional network from scratch, for tiny images."""

    judged: ClassVar[Judged] = "images"

    height: PositiveInt = 32
    """Height that images are averaged to."""
    width: PositiveInt = 32
    """Width."""
    channels: PositiveInt = 8
    """Channels of the two convolutions."""
    hidden: PositiveInt = 64
    """Width of the linear layer after them."""

    def inputs(self, media: Sequence[np.ndarray], prompts: Sequence[str]) -> Tensor:
        """Return (B, 3, height, width) pixels of (H, W, 3) uint8 images, which may differ in size."""
        unit = [torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255 for image in media]
        return torch.cat([self.smooth(each, prompts) for each in unit])

    def smooth(self, media: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return (B, 3, height, width) pixels from -1 to 1."""
        return 2 * nn.functional.adaptive_avg_pool2d(media, (self.height, self.width)) - 1

    def head(self, inputs: Tensor) -> nn.Sequential:
        """Return two convolutions and two linear layers."""
        return _convolutions(inputs, self.channels, self.hidden, self.shares(()).shape[1])


@dataclass(kw_only=True)
class FinalLatents(_Prompted):
    """The model's output before decoding."""

    judged: ClassVar[Judged] = "latents"

    channels: PositiveInt = 16
    """Channels of the two convolutions, for latents with a height and a width."""
    hidden: PositiveInt = 64
    """Width of the linear layer after them."""

    def inputs(self, media: Sequence[np.ndarray], prompts: Sequence[str]) -> Tensor:
        """Return the (C, h, w) float32 latents of all samples as one tensor; frames of a clip are further channels."""
        return self.smooth(torch.from_numpy(np.stack(media).astype(np.float32)), prompts)

    def smooth(self, media: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return (B, C, h, w) latents, or (B, D) of latents without a height and a width."""
        return media.flatten(1, -3) if media.ndim > 3 else media.flatten(1)

    def head(self, inputs: Tensor) -> nn.Sequential:
        """Return two convolutions and two linear layers, or the linear ones alone."""
        outputs = self.shares(()).shape[1]
        if inputs.ndim == 4:
            return _convolutions(inputs, self.channels, self.hidden, outputs)
        return _linear(inputs, self.hidden, outputs)


@dataclass(kw_only=True)
class ClipFeatures(_OneOutput, ClipEmbeddings):
    """Embeddings of a frozen CLIP or SigLIP: the image's, and its product with the prompt's, entry by entry."""

    name: ClassVar[str] = "fitted"
    classes: ClassVar[tuple[str, str]] = ("AutoModel", "AutoProcessor")
    judged: ClassVar[Judged] = "images"

    hidden: NonNegativeInt = 0
    """Width of a layer between; 0: a linear head, whose weights on the products generalize the cosine."""

    @property
    def network(self) -> nn.Module:
        """The towers of images and texts."""
        return self._clip

    def inputs(self, media: Sequence[np.ndarray], prompts: Sequence[str]) -> Tensor:
        """Return (B, 2 D) features of (H, W, 3) uint8 images."""
        return self._joined(self.of_images(media), prompts)

    def smooth(self, media: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return (B, 2 D) features of (B, 3, H, W) images of about 0 to 1."""
        return self._joined(self.of_smooth(media), prompts)

    def _joined(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        # Embeddings have length 1; in this scale their entries are about 1.
        scale = images.shape[1] ** 0.5
        return torch.cat([scale * images, scale**2 * images * self.of_texts(prompts)], 1)

    def head(self, inputs: Tensor) -> nn.Sequential:
        """Return one linear layer, or two."""
        return _linear(inputs, self.hidden)


@dataclass(kw_only=True)
class TextFeatures(_OneOutput, SequenceClassification):
    """Hidden states of a frozen sequence classifier, before its own head: the mean over the tokens of a text."""

    judged: ClassVar[Judged] = "texts"

    label: str | int | None = 0
    """Not used."""
    given: Literal["text", "joined", "pair", "chat"] = "pair"
    """Input of the model, see ``SequenceClassification``."""
    hidden: NonNegativeInt = 0
    """Width of a layer between; 0: a linear head."""

    @property
    def network(self) -> nn.Module:
        """The classifier."""
        return self._model

    def inputs(self, media: Sequence[np.ndarray], prompts: Sequence[str]) -> Tensor:
        """Return (B, D) features of texts."""
        features = []
        for encoded, output in self.outputs([str(text) for text in media], prompts, output_hidden_states=True):
            mask = encoded["attention_mask"][..., None].float()
            features.append((output.hidden_states[-1].float() * mask).sum(1) / mask.sum(1))
        return torch.cat(features)

    def head(self, inputs: Tensor) -> nn.Sequential:
        """Return one linear layer, or two."""
        return _linear(inputs, self.hidden)


@dataclass(kw_only=True)
class TextLikelihood(_OneOutput, Pretrained):
    """How likely a causal language model finds a text after its prompt.

    The inputs are the sum, the mean and the lowest of the log-probabilities of the text's tokens, with the end token.
    """

    name: ClassVar[str] = "fitted"
    judged: ClassVar[Judged] = "texts"

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the weights."""

    def __post_init__(self) -> None:
        """Load the model; raise ConfigError if it cannot be loaded."""
        loaded = self.loaded("AutoModelForCausalLM")
        self._model = settled(loaded, self.chosen(), getattr(torch, self.dtype))
        self._tokenizer = self.loaded("AutoTokenizer")

    @property
    def network(self) -> nn.Module:
        """The language model."""
        return self._model

    def inputs(self, media: Sequence[np.ndarray], prompts: Sequence[str]) -> Tensor:
        """Return (B, 3) figures of texts; raise ValueError if one is longer than the model takes."""
        ends = list(end_tokens(self._tokenizer, self._model.generation_config, self._model.config)[:1])
        shown, texts = (as_texts(self._tokenizer, [str(each) for each in both]) for both in (prompts, media))
        prompt_ids, appended = [self._tokenizer(each)["input_ids"] for each in shown], appended_ends(self._tokenizer)
        before = [each[: len(each) - appended] or ends for each in prompt_ids]
        after = [[*part_ids(self._tokenizer, each), *ends] for each in texts]
        rows = [[*first, *second] for first, second in zip(before, after, strict=True)]
        width, most = max(map(len, rows)), getattr(self._model.config, "max_position_embeddings", None)
        if most is not None and width > most:
            raise ValueError(f"a prompt and its text have {width} tokens, but '{self.model}' takes {most}")
        ids, scored = torch.zeros(2, len(rows), width, dtype=torch.long).unbind()
        mask = torch.zeros_like(ids)
        for row, (first, both) in enumerate(zip(before, rows, strict=True)):
            ids[row, : len(both)], mask[row, : len(both)] = torch.tensor(both), 1
            scored[row, len(first) : len(both)] = 1
        device = self._model.device
        logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, :-1].float()
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None].to(device))[..., 0] * scored[:, 1:].to(device)
        total, count = log_probs.sum(1), scored[:, 1:].sum(1).clamp(min=1).to(device)
        return torch.stack([total, total / count, log_probs.amin(1)], 1)

    def head(self, inputs: Tensor) -> nn.Sequential:
        """Return one linear layer."""
        return _linear(inputs, 0)


def add_adapters(backbone: RewardBackbone, name: str, lora: LoraSection, *, seed: int) -> dict[str, nn.Parameter]:
    """Add low-rank adapters, which change nothing yet, to the model of a backbone; return their parameters by name.

    Args:
        backbone: the backbone; its model is changed in place.
        name: its name in messages.
        lora: rank, alpha and layers; all linear layers of the numbered blocks if it names none.
        seed: seed of their first weights.
    """
    if backbone.network is None:
        raise ConfigError(f"lora: backbone '{name}' has no pretrained model: all its layers are trained. Remove it.")
    targets = lora.targets or block_layers(backbone.network)
    try:
        spec = LoraSpec(rank=lora.rank, alpha=lora.alpha, targets=tuple(targets))
        add_lora(name, backbone.network, spec, seed=seed, autocast=False)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("model.")) from None
    parameters = {key: parameter for key, parameter in backbone.network.named_parameters() if parameter.requires_grad}
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
    return parameters


def _convolutions(inputs: Tensor, channels: int, hidden: int, outputs: int) -> nn.Sequential:
    _, first, height, width = inputs.shape
    return nn.Sequential(
        nn.Conv2d(first, channels, 3, padding="same"),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding="same"),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(channels * height * width, hidden),
        nn.ReLU(),
        _last(hidden, outputs),
    )


def _linear(inputs: Tensor, hidden: int, outputs: int = 1) -> nn.Sequential:
    if not hidden:
        return nn.Sequential(_last(inputs.shape[1], outputs))
    return nn.Sequential(nn.Linear(inputs.shape[1], hidden), nn.ReLU(), _last(hidden, outputs))


def _last(width: int, outputs: int) -> nn.Linear:
    """Return a layer; several outputs begin at 0, so that a feature without judgments says nothing."""
    layer = nn.Linear(width, outputs)
    if outputs > 1:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return layer
