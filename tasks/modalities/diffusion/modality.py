"""The diffusion kind; each method calls the module that implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.engines import make_chain_engine
from flowmill.models.policies.diffusion import DiffusionPolicy, Images, TrainableDenoiser
from flowmill.models.policies.parts import Part
from flowmill.models.policies.tokenization import refusal
from flowmill.models.policies.trainable import Trainable
from flowmill.models.rewards.base import Batch as Scored
from flowmill.models.rewards.base import Needs
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.tasks.algorithms.base import Models, Requirements
from flowmill.tasks.algorithms.diffusion import DiffusionModels
from flowmill.tasks.inputs.components import decode_rows, make_kernel, media_format
from flowmill.tasks.inputs.prompt_rows import read_clip, read_picture
from flowmill.tasks.inputs.prompts import Prompt
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.metrics.image_grids import CLIPS, write_grid
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.diffusion.checks import check_diffusion, cost_of_diffusion
from flowmill.tasks.modalities.diffusion.data_media import DataMedia, media_samples, read_content
from flowmill.tasks.modalities.diffusion.engine_sampling import EngineSampler
from flowmill.tasks.modalities.diffusion.estimate import denoiser_memory, drawing_memory
from flowmill.tasks.modalities.diffusion.evaluation_sampling import EvaluationSampler
from flowmill.tasks.modalities.diffusion.exporting import PipelineExport
from flowmill.tasks.modalities.diffusion.rendering import draw
from flowmill.tasks.modalities.diffusion.reward_gradients import follow
from flowmill.tasks.modalities.diffusion.rollout_sampling import RolloutSampler
from flowmill.tasks.modalities.diffusion.trained_rewards import TrainingRewards, decoded_parts
from flowmill.tasks.modalities.diffusion.training_sets import training_set
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.modalities.gradients import RewardGradientRequest, RewardGradientResult
from flowmill.tasks.modalities.media import check_scored, decode_in_slices, heard, trial_media
from flowmill.tasks.modalities.memory import DrawingMemory, Memory, OptimizerSizes
from flowmill.tasks.modalities.modality import ExportRequest, Modality, Training
from flowmill.tasks.modalities.sample_set import SampleSet
from flowmill.tasks.modalities.samplers import Sampler, SamplingContext
from flowmill.tasks.specs.plan import RunPlan

if TYPE_CHECKING:
    from flowmill.tasks.runtime.host import ModelHost
    from flowmill.tasks.runtime.renderer import Renderer

#: Number of clips of an evaluation that are written as separate files.
_CLIPS = 4


class Diffusion(Modality):
    """Denoisers: samples are images, clips or latents."""

    draws = True
    sampling_parts = frozenset({Part.DENOISER, Part.VAE})
    training_parts = frozenset({Part.DENOISER})
    given_parts = frozenset({Part.VAE})
    exporting_parts = frozenset({Part.DENOISER, Part.VAE})

    def check(self, plan: RunPlan) -> None:
        check_diffusion(plan)

    def cost(self, plan: RunPlan) -> Cost:
        return cost_of_diffusion(plan)

    def memory(self, plan: RunPlan, optimizer: OptimizerSizes, *, reference: bool) -> Memory | None:
        return denoiser_memory(plan, optimizer, reference=reference)

    def drawing_memory(self, plan: ResolvedConfig) -> DrawingMemory | None:
        return drawing_memory(plan)

    def encode(self, host: ModelHost, prompts: Sequence[Prompt]) -> Mapping[str, Tensor]:
        """Return the text encoders' outputs for prompts and their images."""
        policy = host.encoder()
        for prompt in prompts:
            if (mark := policy.first_mark(prompt.text)) is not None:
                raise ConfigError(refusal(prompt.text, mark))
        tensors: Mapping[str, Tensor] = policy.encode([prompt.text for prompt in prompts], *_images(policy, prompts))
        return tensors

    def cut_notes(self, host: ModelHost, prompts: Sequence[Prompt]) -> list[str]:
        """Return the family's notes on prompts that its tokenizers cut."""
        notes: list[str] = host.encoder().cut_notes([prompt.text for prompt in prompts])
        return notes

    def rollout(self, making: SamplingContext) -> Sampler:
        """Return the sampler of stochastic chains, drawn here or by an engine, or of branches of a trunk."""
        engine = make_chain_engine(making.config.rollout.engine)
        return RolloutSampler(making) if engine is None else EngineSampler(making, engine)

    def read_given(self, making: SamplingContext, sample: DataSample) -> DataMedia:
        """Return an image or clip of the configured size, with its sound if the model makes some."""
        return read_content(making, sample)

    def same_given(self, first: DataMedia, second: DataMedia) -> bool:
        """Return whether two images or clips have the same pixels and the same sound."""
        return first.same(second)

    def given(self, making: SamplingContext, samples: Sequence[DataSample], contents: Sequence[Any]) -> list[Sample]:
        return media_samples(making, samples, contents)

    def evaluation(self, making: SamplingContext) -> Sampler:
        return EvaluationSampler(making)

    def add_examples(self, config: RunConfig, folder: Path, samples: Sequence[Sample], *, before: int) -> None:
        form = replace(media_format(config), lossless=False, codec="aac")
        for number, sample in enumerate(samples[: max(0, _CLIPS - before)], before):
            if sample.media is not None and sample.media.ndim == 4:
                (folder / CLIPS).mkdir(exist_ok=True)
                (folder / CLIPS / f"{number:03d}.mp4").write_bytes(form.encode(sample.media, sample.sound))

    def check_scored(self, section: RewardSection, needs: Needs, config: RunConfig) -> None:
        """Check that a reward's media are decoded (images, clips, sounds) or stored (latents), and are not texts."""
        check_scored(section, needs, config)

    def trial(self, config: RunConfig) -> np.ndarray:
        return trial_media(config)

    def scored(self, shard: TrajectoryShard, needs: Needs, recent: Sequence[np.ndarray] | None) -> np.ndarray:
        rows = range(shard.table.num_rows)
        if needs.media == "latents":
            return np.stack([shard.final_latents(row) for row in rows])
        if needs.media == "sounds":
            return heard(shard, needs.rate)
        return np.stack(recent or [shard.media(row) for row in rows])

    def show(self, folder: Path, batch: Scored, verdicts: Sequence[str], texts: Sequence[str] | None = None) -> None:
        if batch.media.dtype == np.uint8:
            write_grid(folder, batch.media, batch.prompts, verdicts, texts)

    def draw(self, renderer: Renderer, texts: Sequence[str], seeds: Sequence[int], images: Images) -> np.ndarray:
        """Render texts by the ODE; texts and source images are encoded on the fly."""
        return draw(renderer, texts, seeds, images)

    def decoder(self, config: RunConfig, host: ModelHost) -> Callable[[np.ndarray], np.ndarray]:
        """Return the decoder of states; only the autoencoder is loaded."""
        policy = cast(DiffusionPolicy, host.load(frozenset({Part.VAE})))

        def decode(states: np.ndarray) -> np.ndarray:
            latents = torch.from_numpy(states).float().to(host.device)
            with torch.no_grad():
                return np.asarray(decode_in_slices(policy, policy.decode, latents, decode_rows(config)).numpy())

        return decode

    def training_set(
        self, training: Training, shards: Sequence[TrajectoryShard], advantages: pa.Table, requires: Requirements
    ) -> SampleSet:
        """Return stored transitions, stored states, or final samples to noise again, as the algorithm needs."""
        return training_set(training, shards, advantages, requires)

    def follow(self, following: RewardGradientRequest, batch: Scored) -> RewardGradientResult:
        return follow(following, batch)

    def asked_parts(self, config: RunConfig) -> frozenset[Part]:
        return decoded_parts(config)

    def give_rewards(self, models: Models, host: ModelHost) -> None:
        cast(DiffusionModels, models).rewards = TrainingRewards(host.config, host)

    def models(self, config: RunConfig, trainable: Trainable, further: Mapping[str, Trainable]) -> DiffusionModels:
        return DiffusionModels(trainable=cast(TrainableDenoiser, trainable), kernel=make_kernel(config))

    def export(self, exporting: ExportRequest, folder: Path) -> None:
        PipelineExport(exporting).write(folder)


def _images(policy: DiffusionPolicy, prompts: Sequence[Prompt]) -> list[Images]:
    """Return the images or clips of prompts as one further argument, or no argument."""
    if not any(prompt.images for prompt in prompts):
        return []
    clips = policy.starts_from_clips
    read = partial(read_clip, most=policy.settings.frames) if clips else read_picture
    return [[[read(path) for path in prompt.images] for prompt in prompts]]
