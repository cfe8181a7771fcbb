"""What a person may write in a config file: one frozen section per concern.

A component (sampler, reward, algorithm, ...) is a name and its options; the options are checked by the
component's own dataclass, so this file does not grow with them. Adding a setting: one field with a docstring.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, PrivateAttr, model_validator

from configs.advantages import AdvantageSection, ReplaySection
from configs.algorithm_defaults import with_followers
from configs.base import Component, Later, Section
from configs.critic import CriticSection
from configs.execution import ExecutionSection
from configs.model import ModelSection
from configs.optimizer import EmaSection, ScheduleSection
from configs.render import RenderSection
from configs.rewards import RewardSection
from configs.tokens import TokensSection
from configs.tracking import TrackingSection


class RunSection(Section):
    """Which run this is."""

    name: str | None = None
    """Name of the run in the store and in MLflow; the config file's name when absent."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed from which every random draw of the run is derived."""
    epochs: int = Field(1, ge=0, le=1_000_000)
    """Rollout-score-optimize rounds. May be raised later: finished epochs are kept."""


#: Endings of files of prompts.
PROMPT_FILES = (".txt", ".jsonl", ".parquet", ".csv", ".tsv")


class PromptSource(Section):
    """One of several lists of prompts."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    """What it is called in `rewards[].sources`, figures and the prompts' metadata."""
    train: str
    """Prompts to train on; paths are relative to the config file."""
    heldout: str | None = None
    """Prompts never trained on, for evaluation."""
    weight: float = Field(1.0, gt=0)
    """Share of an epoch's groups, over the sum of all weights."""


class PromptsSection(Section):
    """Where prompts come from: a file (.txt, .jsonl, .parquet, or .csv and .tsv with a header), a folder that
    `save_to_disk` of datasets wrote, or a Hugging Face dataset id."""

    train: str | None = None
    """Prompts to train on; paths are relative to the config file."""
    heldout: str | None = None
    """Prompts never trained on, for evaluation."""
    sources: tuple[PromptSource, ...] = ()
    """Instead of these two: several lists, mixed by weight, each with rewards of its own if wanted."""
    column: str = "prompt"
    """Column or key that holds the prompt; the others become metadata for rewards."""
    image: str | None = None
    """Column or key with the path of an image to start from, or a list of paths, relative to the prompt file; or of a
    clip, for models that start from one."""
    split: str = "train"
    """Split to read when the source is a Hugging Face dataset id, or a folder of `save_to_disk` with several."""

    @model_validator(mode="after")
    def _one_way(self) -> PromptsSection:
        if (self.train is None) == (not self.sources) or (self.sources and self.heldout is not None):
            raise ValueError("prompts needs either 'train' (and maybe 'heldout') or 'sources', each with its own")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"prompts.sources: {', '.join(names)}: give each its own name")
        return self

    def lists(self, split: Literal["train", "heldout"]) -> dict[str, str]:
        """Return the lists of a split by setting, in order."""
        if self.train is not None:
            found = {f"prompts.{split}": getattr(self, split)}
        else:
            found = {f"prompts.sources.{n}.{split}": getattr(each, split) for n, each in enumerate(self.sources)}
        return {setting: source for setting, source in found.items() if source is not None}


class MediaSection(Section):
    """How generated images and clips are stored; what is stored is what is scored."""

    format: Literal["auto", "png", "webp", "mp4", "none"] = "auto"
    """File format; auto: png for images, mp4 for clips. none: nothing is decoded, for rewards that score latents."""
    latents: Annotated[bool, Later()] = False
    """Keep every sample's final latents too, for rewards that score latents."""
    lossless: bool = True
    """Keep every value; otherwise webp and mp4 are compressed visually lossless."""
    fps: int = Field(16, ge=1)
    """Frames per second of clips."""

    @property
    def decodes(self) -> bool:
        """Whether samples are decoded."""
        return self.format != "none"


class RolloutSection(Section):
    """How trajectories are generated."""

    prompts_per_epoch: int = Field(8, ge=1, le=10_000_000)
    """Groups per epoch; prompts are taken from a seeded permutation, pass after pass."""
    group_size: int = Field(8, ge=1, le=100_000)
    """Samples per prompt."""
    steps: int = Field(10, ge=1, le=10_000)
    """Denoising steps of a rollout."""
    sampler: Component = Component(name="flow_sde")
    """Transition kernel of the trained steps."""
    solver: str = "euler"
    """Deterministic solver of the steps without noise."""
    plan: Component = Component(name="all")
    """Which steps are stochastic and stored for training; 'final' when absent with an algorithm that needs no steps."""
    same_noise: bool = False
    """All samples of a group start from the same initial noise."""
    own_noise: Annotated[float, Later()] = Field(0.0, ge=0, le=1)
    """With same_noise: how far each sample starts from it, as a noise_level of the sampler 'cps'; 1 is a start of its
    own."""
    groups_per_shard: int | None = Field(None, ge=1)
    """Groups in one committed shard at most, 4 when absent: what a crash can cost, and the unit scored while rollout
    goes on. Where several processes would wait for each other shards are smaller, parts of groups too. Changes no
    result."""
    latents_dtype: Literal["float32", "float16"] = "float32"
    """Storage precision; latents are rounded to it before their log-prob is computed."""
    unconditional: bool = False
    """Store guidance's predictions for the negative prompt at trained steps, 4 bytes per number, which the first update
    of an epoch then need not compute again. With ``optimize.guidance_gradient`` conditional."""
    store: str = "webdataset"
    """Trajectory store format: webdataset or parquet."""
    media: MediaSection = MediaSection()
    """How images and clips are stored."""
    tokens: TokensSection | None = None
    """How texts are sampled, of causal language models alone."""


class OptimizeSection(Section):
    """The optimizer and its schedule."""

    algorithm: Component = Component(name="grpo")
    """The training objective."""
    optimizer: Annotated[str, Later()] = "adamw"
    """adamw, or adamw8bit: moments of a byte per number, a quarter of the memory; rounded, so other results."""
    learning_rate: float = Field(3e-4, gt=0)
    """AdamW learning rate."""
    schedule: ScheduleSection | None = None
    """How the learning rate changes over the run; constant when absent."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW moments."""
    weight_decay: float = Field(1e-4, ge=0)
    """AdamW decoupled weight decay."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW denominator term."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    updates_per_epoch: int = Field(2, ge=1, le=1_000_000)
    """Optimizer updates per pass over an epoch's (sample, step) pairs."""
    inner_epochs: int = Field(1, ge=1, le=1_000)
    """Passes over the pairs of an epoch."""
    replay: ReplaySection | None = None
    """Train on trajectories of earlier epochs too."""
    guidance_gradient: Literal["conditional", "both"] = "both"
    """With guidance: differentiate both predictions, which is the gradient of the log-prob that is replayed, or the
    conditional one alone, which is a quarter cheaper and another gradient."""
    ema: EmaSection | None = None
    """Keep an average of the weights; evaluation and export then use it."""


class EvaluateSection(Section):
    """Deterministic evaluation: ODE sampling, fixed seeds, train and held-out prompts apart."""

    every: int = Field(10, ge=1)
    """Evaluate every so many epochs, besides before the first and after the last."""
    samples: int = Field(64, ge=1, le=10_000_000)
    """Images per split; prompts repeat with other seeds when there are fewer."""
    steps: int | None = Field(None, ge=1, le=10_000)
    """ODE steps; rollout.steps when absent."""
    solver: str = "euler"
    """Deterministic solver."""
    height: int | None = Field(None, ge=1, le=1 << 16)
    """Image height in pixels; model.height when absent."""
    width: int | None = Field(None, ge=1, le=1 << 16)
    """Image width in pixels; model.width when absent."""
    frames: int | None = Field(None, ge=1, le=1 << 16)
    """Frames of a clip; model.frames when absent."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the initial noise, independent of run.seed so that runs compare."""
    judges: tuple[RewardSection, ...] = ()
    """Rewards that are only reported, never optimized."""
    images: int = Field(16, ge=0)
    """Images per split in the logged grid."""


class ExportSection(Section):
    """What the last stage writes."""

    format: Literal["auto", "lora", "full"] = "auto"
    """A LoRA file, or a full pipeline folder; auto follows what was trained."""


class StoreSection(Section):
    """Where artifacts live."""

    root: str = "flowmill-store"
    """Folder of the artifact store, or s3://bucket/prefix."""
    cache: str | None = None
    """Folder for local copies of what lies on S3; a folder in the user's cache when absent."""
    cache_size: int = Field(20_000_000_000, ge=64_000_000)
    """Bytes of local copies to keep; those not used for longest go first."""
    single_writer: bool = False
    """Only one process ever writes to this store: commit on S3 servers without conditional writes too."""


class AlgorithmNeeds(NamedTuple):
    """What of an algorithm's requirements decides which stages a run has and what they are made from."""

    old_means: bool
    """Rollouts store the means of the behavior policy's steps."""
    gradients: bool
    """There are stages of gradients of the rewards."""
    rewards: int
    """How often the rewards are asked of a row while training."""


class RunConfig(Section):
    """One training run."""

    run: RunSection = RunSection()
    """Which run this is."""
    store: StoreSection = StoreSection()
    """Where artifacts live."""
    model: ModelSection
    """The base model."""
    prompts: PromptsSection
    """The prompts."""
    rollout: RolloutSection = RolloutSection()
    """Trajectory generation."""
    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    """What is optimized: one or more rewards."""
    monitors: tuple[RewardSection, ...] = ()
    """Rewards that are scored on every rollout and plotted, never optimized: what should not fall while they rise."""
    advantage: AdvantageSection = AdvantageSection()
    """From rewards to advantages."""
    optimize: OptimizeSection = OptimizeSection()
    """The training objective and optimizer."""
    critic: CriticSection = CriticSection()
    """The critic of algorithms that learn values, such as ppo."""
    render: RenderSection | None = None
    """An image model that is never trained and draws the texts of a language model, which rewards then look at."""
    evaluate: EvaluateSection = EvaluateSection()
    """Evaluation."""
    export: ExportSection = ExportSection()
    """Export."""
    tracking: TrackingSection = TrackingSection()
    """MLflow."""
    execution: ExecutionSection = ExecutionSection()
    """How the work is carried out."""

    # No setting: what a run wrote down of an algorithm, so that who reads the run need not import it.
    _needs: tuple[Component, AlgorithmNeeds] | None = PrivateAttr(default=None)

    def knowing(self, algorithm: Component, needs: AlgorithmNeeds) -> Self:
        """Return the config with what is known of an algorithm without importing it."""
        known = self.model_copy()
        known._needs = (algorithm, needs)
        return known

    def like(self, other: RunConfig) -> Self:
        """Return the config with what another knows of algorithms."""
        return self if other._needs is None else self.knowing(*other._needs)

    @property
    def known_needs(self) -> AlgorithmNeeds | None:
        """What is known of this config's algorithm without importing it, if anything."""
        return self._needs[1] if self._needs is not None and self._needs[0] == self.optimize.algorithm else None

    @model_validator(mode="before")
    @classmethod
    def _as_the_algorithm_needs(cls, data: Any) -> Any:
        return with_followers(data)

    @property
    def scored(self) -> tuple[RewardSection, ...]:
        """What every rollout is scored with: rewards and monitors."""
        return (*self.rewards, *self.monitors)
