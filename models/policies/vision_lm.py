"""Vision-language models of transformers (``AutoModelForImageTextToText``): texts on images.

Images are encoded one by one, each image of a batch once, and their features passed to the language model: these
depend neither on other images nor on rows, in sampling as in training. Tokens of images have negative ids,
see ``pictures``. Legend: B rows, W positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import FAMILIES
from flowmill.configs.schema import RunConfig
from flowmill.models.devices import moved
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.critic_lm import CriticLM, block_lists
from flowmill.models.policies.language_classes import at, check_causal, whole
from flowmill.models.policies.language_model_folders import LanguageModels
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pictures import CACHED_BYTES, Pictures, arguments_of, pictures_of
from flowmill.models.policies.sized_cache import SizedCache
from flowmill.models.weights.lora import within

VISION = LanguageModels(
    policy="vision_lm",
    auto="AutoModelForImageTextToText",
    label="a vision-language model (...ForConditionalGeneration)",
    names=("ForConditionalGeneration",),
    reader="AutoProcessor",
    task="image-text-to-text",
)
"""Models of texts on images."""
#: Classes whose log-probs ``tests/models/policies/test_vision_lm.py`` compares with their own forward.
_TESTED = frozenset("gemma3 internvl qwen2_5_vl qwen2_vl qwen3_vl smolvlm".split())
#: Parts that encode images and project their features, as the classes name them.
_TOWERS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector")
#: Logit of tokens that are never drawn: its probability is 0 in float32 at any sensible temperature, and so is its
#: part of an entropy. Half precision can represent it.
NEVER = -3e4


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    """Options of ``model.options``."""

    images: Annotated[int, Field(ge=1)] = FAMILIES["vision_lm"].images or 0
    """Maximum images per prompt."""
    train_vision: bool = False
    """Also train the parts that encode images; otherwise they stay frozen."""


class VisionLM(CausalLM):
    """One vision-language model with its processor."""

    options_type = VisionOptions
    models = VISION
    pictures: Pictures | None = None
    """The images that its prompts refer to; None: it reads texts alone, to measure its memory."""

    @classmethod
    def load(
        cls, folder: Path, settings: PolicySettings, parts: frozenset[Part], options: Mapping[str, Any]
    ) -> VisionLM:
        """Load the model and its processor from a folder that ``save_pretrained`` wrote; see ``CausalLM``."""
        policy = super().load(folder, settings, parts, options)
        assert isinstance(policy, VisionLM)
        policy.pictures, policy.untrained = pictures_of(folder), cls.untrained_parts(options)
        policy.files = policy.pictures.files
        return policy

    @classmethod
    def untrained_parts(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return () if options.get("train_vision") else _TOWERS

    @classmethod
    def check_model(cls, folder: Path, model: Any) -> None:
        check_causal(folder, model)
        if model.config.model_type not in _TESTED:
            raise ConfigError(
                f"model.path '{folder}' holds a {type(model).__name__}, but model.policy 'vision_lm' is tested with "
                f"the types {', '.join(sorted(_TESTED))}. Choose one of these."
            )

    @classmethod
    def check_run(cls, config: RunConfig) -> None:
        super().check_run(config)
        tokens = config.rollout.tokens
        if tokens is not None and tokens.engine.name != "local":
            raise ConfigError(
                f"rollout.tokens.engine is '{tokens.engine.name}', which gets token ids and reads no images, but "
                "model.policy 'vision_lm' writes about images. Remove it."
            )
        if config.optimize.shared_prompts:
            raise ConfigError(
                "optimize.shared_prompts packs texts, but prompts of model.policy 'vision_lm' have images. Remove it."
            )
        if config.model.options.get("train_vision") and config.execution.strategy == "fsdp":
            raise ConfigError(
                "model.options.train_vision is true, but execution.strategy 'fsdp' keeps encoders of images whole and "
                "frozen on every rank. Set train_vision to false, or execution.strategy to 'ddp'."
            )

    @classmethod
    def pictures_in(cls, folder: Path) -> Pictures:
        return pictures_of(folder)

    @classmethod
    def prepare_critic(cls, critic: CriticLM, folder: Path) -> None:
        pictures = pictures_of(folder)
        critic.untrained = _TOWERS
        cache = _feature_cache()
        critic.model.inputs = lambda backbone, ids: _inputs(
            backbone, ids, None, None, pictures, _Encoder(backbone, pictures, cache)
        )

    @property
    def blocks(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for name in block_lists(self.model) if not within(name, _TOWERS))

    @property
    def entered(self) -> list[nn.Module]:
        return [part for name, part in self.model.base_model.named_children() if name in _TOWERS]

    def first_position(self, prompt: Sequence[int]) -> int:
        """Return the position of the first token after a prompt: images take fewer positions than tokens in classes
        that place their tokens in three dimensions."""
        assert self.pictures is not None
        placed = _placed(self.model.base_model, [list(prompt)], None, self.pictures)
        return len(prompt) if placed is None else int(placed.max()) + 1

    def inputs(self, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> dict[str, Any]:
        if self.pictures is None:
            return super().inputs(model, ids, mask, positions)
        # A frozen encoder is the same in all models of a run, also where a reference rounds it in another way.
        encoder = self.model if self.untrained else model
        cache = self._features if self.untrained else None
        return _inputs(model, ids, mask, positions, self.pictures, _Encoder(encoder.base_model, self.pictures, cache))

    def allowed(self, logits: Tensor) -> Tensor:
        return logits.index_fill_(-1, moved(self._never, logits.device), NEVER)

    @cached_property
    def _features(self) -> SizedCache:
        return _feature_cache()

    @cached_property
    def _never(self) -> Tensor:
        """Tokens that stand for images, clips and sounds: features would replace them, but there are none."""
        names = (f"{medium}_token_{end}" for medium in ("image", "video", "audio") for end in ("id", "index"))
        tokens = {getattr(self.model.config, name, None) for name in names}
        return torch.tensor(sorted(token for token in tokens if token is not None and token < self.vocabulary))


def _feature_cache() -> SizedCache:
    return SizedCache(CACHED_BYTES, lambda value: sum(tensor.nbytes for tensor in _tensors(list(value.values()))))


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for each in value for tensor in _tensors(each)]


@dataclass(frozen=True, slots=True)
class _Encoder:
    """Encodes images with a model."""

    core: Any
    """The model, without its language head."""
    pictures: Pictures
    cache: SizedCache | None
    """Features of images seen before, where they do not change."""

    def outputs(self, numbers: Sequence[int], device: torch.device) -> Any:
        """Return the encoder's output for images, in the order of the rows' tokens."""
        by_number = {number: self._output(number, device) for number in dict.fromkeys(numbers)}
        outputs = [by_number[number] for number in numbers]
        fields = {"pooler_output": _joined([output.pooler_output for output in outputs])}
        if outputs[0].get("deepstack_features") is not None:
            layers = zip(*(output.deepstack_features for output in outputs), strict=True)
            fields["deepstack_features"] = [_joined(layer) for layer in layers]
        return type(outputs[0])(**fields)

    def _output(self, number: int, device: torch.device) -> Any:
        def encode() -> Any:
            arguments = arguments_of(self.core.get_image_features, self.pictures.inputs(number))
            output = self.core.get_image_features(
                **{name: moved(value, device) for name, value in arguments.items()}, return_dict=True
            )
            names = {"pooler_output", "deepstack_features"}
            return type(output)(**{name: value for name, value in output.items() if name in names})

        return encode() if self.cache is None else self.cache.of(number, encode)


def _inputs(
    model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor | None, pictures: Pictures, encoder: _Encoder
) -> dict[str, Any]:
    """Return the arguments of a model for rows (B, W) from their first token on; see ``CausalLM.inputs``."""
    rows = ids.tolist()
    numbers = [number for row in rows for number in pictures.of_row(row)]
    placed = _placed(model.base_model, rows, mask, pictures)
    kinds, plain = (ids < 0).long(), ids.masked_fill(ids < 0, pictures.token)
    positions = positions if placed is None else moved(placed, ids.device)
    arguments = whole(model, plain) if positions is None else at(model, plain, positions)
    if numbers:
        arguments["mm_encoder_outputs"] = {"image": encoder.outputs(numbers, ids.device)}
    return arguments | arguments_of(type(model).forward, {"token_type_ids": kinds, "mm_token_type_ids": kinds})


def _joined(parts: Sequence[Any]) -> Any:
    """Return the features of images as one: some classes give a tensor, others a list with a tensor per image."""
    return torch.cat(list(parts)) if isinstance(parts[0], torch.Tensor) else [each for part in parts for each in part]


def _placed(core: Any, rows: Sequence[list[int]], mask: Tensor | None, pictures: Pictures) -> Tensor | None:
    """Return (3, B, W) positions in time, height and width, on the CPU; None if the class counts tokens.

    They depend on the row up to its last image, after which they count on from the largest one.
    """
    if not hasattr(core, "get_rope_index"):
        return None
    positions = torch.zeros(3, len(rows), len(rows[0]), dtype=torch.int64)
    starts = [0] * len(rows) if mask is None else (1 - mask).sum(-1).tolist()
    for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
        last = max((place for place, token in enumerate(row) if token < 0), default=start - 1) + 1
        if last > start:
            positions[:, number, start:last] = _places(core, tuple(row[start:last]), pictures)
        first = positions[:, number, start:last].max() + 1 if last > start else torch.tensor(0)
        positions[:, number, last:] = torch.arange(len(row) - last) + first
    return positions


def _places(core: Any, row: tuple[int, ...], pictures: Pictures) -> Tensor:
    """Return the (3, L) positions of a row up to its last image, as its class computes them."""

    def place() -> Tensor:
        grids = [pictures.inputs(number)["image_grid_thw"] for number in pictures.of_row(row)]
        ids = torch.tensor([row])
        arguments = {"mm_token_type_ids": (ids < 0).long(), "image_grid_thw": torch.cat(grids)}
        placed: Tensor = core.get_rope_index(ids.masked_fill(ids < 0, pictures.token), **arguments)[0]
        return placed[:, 0]

    positions: Tensor = pictures.places.of(row, place)
    return positions
