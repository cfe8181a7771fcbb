"""The kind of images from tokens: trained as texts, stored, scored and shown as images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from flowmill.configs.errors import ConfigError
from flowmill.configs.escaping import in_python
from flowmill.configs.refusals import Refusal, refuse
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.devices import moved
from flowmill.models.maths.generation import Completion
from flowmill.models.memory.language_architectures import language_config
from flowmill.models.policies.causal_lm import CausalLM, TrainableLM
from flowmill.models.policies.janus import LEAST_SCALE, Janus
from flowmill.models.policies.parts import Part
from flowmill.models.policies.trainable import Trainable
from flowmill.models.rewards.base import Batch as Scored
from flowmill.models.rewards.base import Needs
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.algorithms.tokens import TokenBatch, TokenModels
from flowmill.tasks.inputs.components import decode_rows, tokens_of
from flowmill.tasks.metrics.image_grids import write_grid
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.modalities.media import check_scored, decode_in_slices, trial_media
from flowmill.tasks.modalities.modality import ExportRequest
from flowmill.tasks.modalities.samplers import Sampler, SamplingContext
from flowmill.tasks.modalities.tokens.checks import check_tokens, cost_of_tokens
from flowmill.tasks.modalities.tokens.data_texts import DataImage, image_samples, read_image
from flowmill.tasks.modalities.tokens.exporting import LanguageModelExport, in_python_of
from flowmill.tasks.modalities.tokens.modality import Tokens
from flowmill.tasks.modalities.tokens.prompts import Prompts, with_places
from flowmill.tasks.modalities.tokens.text_sampling import TextSampler, evaluation_maker, rollout_maker
from flowmill.tasks.specs.plan import RunPlan


class ImageTokenSampler(TextSampler):
    """Draws the tokens of images with a policy; all have the same number."""

    def load(self) -> None:
        """Load the policy, and check the size of its images."""
        super().load()
        check_image(self._making.config, self._trainable().policy.model.config)

    def _contents(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        policy = cast(Janus, self._trainable().policy)
        ids = moved(torch.tensor([each.ids for each in completions]), self._host.device)
        images = decode_in_slices(policy, policy.decode, ids, decode_rows(self._making.config)).numpy()
        return [{"media": image} for image in images]


class DataImageModels(TokenModels):
    """Log-probs of images of data, which no guidance drew."""

    def log_probs(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        with cast(Janus, self.trainable.policy).without_guidance():
            return super().log_probs(batch)

    def reference_log_probs(self, batch: TokenBatch) -> torch.Tensor:
        with cast(Janus, self.trainable.policy).without_guidance():
            return super().reference_log_probs(batch)


class ImageTokens(Tokens):
    """Models that draw images token by token."""

    trained_as = "tokens"
    writes = False
    given_parts = frozenset({Part.VAE})

    def check(self, plan: RunPlan) -> None:
        check_image_tokens(plan)

    def cost(self, plan: RunPlan) -> Cost:
        return with_guidance(cost_of_tokens(plan), plan.config)

    def rollout(self, making: SamplingContext) -> Sampler:
        """Return the sampler of images, with a seed per token."""
        return rollout_maker(making, ImageTokenSampler)

    def read_given(self, making: SamplingContext, sample: DataSample) -> DataImage:  # type: ignore[override]
        """Return the token ids of a prompt, and an image of the model's size."""
        return read_image(making, sample)

    def same_given(self, first: DataImage, second: DataImage) -> bool:
        return np.array_equal(first.pixels, second.pixels)

    def given(self, making: SamplingContext, samples: Sequence[DataSample], contents: Sequence[Any]) -> list[Sample]:
        """Return images with the tokens that the model codes them by."""
        policy = cast(Janus, making.host.decoding())
        pixels = torch.from_numpy(np.stack([each.pixels for each in contents]))
        ids = decode_in_slices(policy, policy.encode_images, pixels, decode_rows(making.config))
        return image_samples(samples, contents, ids.tolist())

    def evaluation(self, making: SamplingContext) -> Sampler:
        """Return the sampler of the likeliest images, or of draws with fixed seeds."""
        return evaluation_maker(making, ImageTokenSampler)

    def models(self, config: RunConfig, trainable: Trainable, further: Mapping[str, Trainable]) -> TokenModels:
        """Return log-probs, with guidance if the policy drew the images."""
        kind = TokenModels if config.data is None else DataImageModels
        return kind(trainable=cast(TrainableLM, trainable), temperature=tokens_of(config).temperature)

    def check_scored(self, section: RewardSection, needs: Needs, config: RunConfig) -> None:
        if needs.media == "latents":
            raise ConfigError(
                f"rewards: '{section.slot}' scores latents, which images of tokens do not have. Choose one of images."
            )
        check_scored(section, needs, config)

    def trial(self, config: RunConfig) -> np.ndarray:
        return trial_media(config)

    def scored(self, shard: TrajectoryShard, needs: Needs, recent: Sequence[np.ndarray] | None) -> np.ndarray:
        return np.stack(recent or [shard.media(row) for row in range(shard.table.num_rows)])

    def show(self, folder: Path, batch: Scored, verdicts: Sequence[str], texts: Sequence[str] | None = None) -> None:
        write_grid(folder, batch.media, batch.prompts, verdicts)

    def export(self, exporting: ExportRequest, folder: Path) -> None:
        ImageTokenExport(exporting).write(folder)


def _refusals(config: RunConfig, requires: Requirements) -> Iterator[Refusal]:
    lacks = f"model.policy '{config.model.policy}', a model that draws images token by token, does not have"
    if requires.critic:
        yield Refusal(
            "optimize.algorithm",
            lacks,
            "Remove it, or choose another",
            f"optimize.algorithm is '{config.optimize.algorithm.name}', which trains a critic, which",
        )
    if not config.rollout.media.decodes:
        yield Refusal(
            "rollout.media.format",
            lacks,
            "Remove it, or choose another",
            "rollout.media.format is 'none': samples without images, which",
        )


def check_image_tokens(plan: RunPlan) -> None:
    """Check the settings of images from tokens, and that settings of other kinds are not used."""
    config = plan.config
    refuse(config, _refusals(config, plan.requires))
    check_tokens(plan)
    architecture = None if config.model.path is None else language_config(config.model.path)
    if architecture is not None:
        check_image(config, architecture)


def check_image(config: RunConfig, architecture: Any) -> None:
    """Check that a run draws images of the size of its model; ``architecture``: the model's config."""
    count, side = int(architecture.vision_config.num_image_tokens), int(architecture.vision_config.image_size)
    for setting, value, own in (
        ("rollout.tokens.max_new", tokens_of(config).max_new, count),
        ("model.height", config.model.height, side),
        ("model.width", config.model.width, side),
    ):
        if value != own:
            raise ConfigError(
                f"{setting} is {value}, but an image of the model has {count} tokens, and {side} x {side} pixels. Set "
                f"{setting} to {own}."
            )


def with_guidance(cost: Cost, config: RunConfig) -> Cost:
    """Return the cost of a run with two rows of the model per row of a sample, where there is guidance; training on
    images of data has none."""
    names = [name for name in asdict(cost) if name.endswith("_forwards")]
    names = names if config.data is None else ["evaluate_forwards"]
    copies = 2 if config.model.guidance_scale > 1 else 1
    return replace(cost, **{name: copies * getattr(cost, name) for name in names})


_USAGE = """processor = AutoProcessor.from_pretrained(folder)
{text}
inputs = processor(text=text, generation_mode="image", return_tensors="pt")
drawn = {{"do_sample": True, "temperature": {temperature}, "top_k": 0, "top_p": 1.0}}
ids = model.generate(**inputs, generation_mode="image", guidance_scale={scale}, **drawn)
pixels = list(model.decode_image_tokens(ids).detach().permute(0, 3, 1, 2).float().numpy())
(image,) = processor.postprocess(pixels, return_tensors="PIL.Image.Image")["pixel_values"]
image.save("image.png")"""


class ImageTokenExport(LanguageModelExport):
    """A model folder, or an adapter and the base model's name; with card and settings."""

    def _usage(self, policy: CausalLM) -> str:
        return _USAGE.format(
            text=_text_of(self._prompts(policy)),
            temperature=tokens_of(self._config).temperature,
            scale=max(LEAST_SCALE, self._config.model.guidance_scale),
        )


def _text_of(prompts: Prompts) -> str:
    prompt = prompts.section.instructed("...")
    if not prompts.chat:
        return f"text = {in_python(prompt)}"
    messages = with_places([{"role": role, "content": text} for role, text in prompts.messages(prompt)], [])
    return (
        f"messages = {in_python_of(messages)}\n"
        "text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)"
    )
