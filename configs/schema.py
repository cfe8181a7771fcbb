"""The schema of config files: one frozen section per concern.

A component (sampler, reward, algorithm, ...) is a name and its options; the component's own dataclass checks the
options, so this file does not grow with them. To add a setting, add one field with a docstring.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, PrivateAttr, model_validator

from flowmill.configs.advantages import AdvantageSection, ReplaySection
from flowmill.configs.algorithm_defaults import IDENTITIES, AlgorithmNeeds, with_followers
from flowmill.configs.base import Component, Later, Section
from flowmill.configs.critic import CriticSection
from flowmill.configs.data import DataSection
from flowmill.configs.execution import ExecutionSection
from flowmill.configs.model import ModelSection
from flowmill.configs.optimizer import Beta, EmaSection, ScheduleSection
from flowmill.configs.rate import RateSection
from flowmill.configs.render import RenderSection
from flowmill.configs.rewards import RewardSection
from flowmill.configs.tokens import TokensSection
from flowmill.configs.watch import WatchSection


class RunSection(Section):
    """Name, seed and length of the run."""

    name: str | None = None
    """Name of the run in the store and in MLflow; the config file's name when absent."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed from which every random draw of the run is derived."""
    epochs: int = Field(1, ge=0, le=1_000_000)
    """Rollout-score-optimize rounds. May be raised later: finished epochs are kept."""


class PromptSource(Section):
    """One of several lists of prompts."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    """Its name in `rewards[].sources`, figures and the prompts' metadata."""
    train: str
    """Prompts to train on; paths are relative to the config file."""
    heldout: str | None = None
    """Prompts never trained on, for evaluation."""
    weight: float = Field(1.0, gt=0)
    """Share of an epoch's groups, over the sum of all weights."""


class PromptsSection(Section):
    """Sources of prompts: a file with one per line (.txt), or rows as `data.train` takes them, in the same forms;
    or a list of texts."""

    train: str | tuple[str, ...] | None = None
    """Prompts to train on; paths are relative to the config file."""
    heldout: str | tuple[str, ...] | None = None
    """Prompts never trained on, for evaluation."""
    sources: tuple[PromptSource, ...] = ()
    """Instead of train and heldout: several lists, mixed by weight, optionally with separate rewards."""
    column: str = "prompt"
    """Column or key that holds the prompt; the others become metadata for rewards."""
    image: str | None = None
    """Column or key with the path of an input image or clip, or a list of paths, relative to the prompt file."""
    sampler: Annotated[Component, Later()] = Component(name="permutation")
    """Chooses the prompts of an epoch: by permutations of the list, or from rewards of earlier epochs."""
    split: str = "train"
    """Split to read when the source is a Hugging Face dataset id, or a folder of `save_to_disk` with several."""

    @model_validator(mode="after")
    def _one_way(self) -> PromptsSection:
        if self.sources and (self.train is not None or self.heldout is not None):
            raise ValueError("prompts needs either 'train' (and maybe 'heldout') or 'sources', each with its own")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"prompts.sources: {', '.join(names)}: give each its own name")
        return self

    @property
    def chooses(self) -> bool:
        """Whether the choice of prompts is a stage, because it reads rewards."""
        return bool(self.sampler != PromptsSection.model_fields["sampler"].default)

    @property
    def weights(self) -> dict[str, float]:
        """The share of each source by name, with any sum; '' where there is one list."""
        return {source.name: source.weight for source in self.sources} or {"": 1.0}

    def lists(self, split: Literal["train", "heldout"]) -> dict[str, str | tuple[str, ...]]:
        """Return the lists of a split by setting, in order."""
        sources = {f"prompts.{split}": getattr(self, split)}
        if self.sources:
            sources = {f"prompts.sources.{n}.{split}": getattr(each, split) for n, each in enumerate(self.sources)}
        return {setting: source for setting, source in sources.items() if source is not None}


class MediaSection(Section):
    """Storage of generated images and clips; rewards score the stored media."""

    format: Literal["auto", "png", "webp", "mp4", "none"] = "auto"
    """File format; auto: png for images, mp4 for clips. none: nothing is decoded, for rewards that score latents."""
    latents: Annotated[bool, Later()] = False
    """Also keep every sample's final latents, for rewards that score latents."""
    lossless: bool = True
    """Keep every value; otherwise webp and mp4 are compressed visually lossless."""
    fps: int = Field(16, ge=1)
    """Frames per second of clips."""

    @property
    def decodes(self) -> bool:
        """Whether samples are decoded."""
        return self.format != "none"


class RolloutSection(Section):
    """Generation of trajectories."""

    prompts_per_epoch: int = Field(8, ge=1, le=10_000_000)
    """Groups per epoch, of different prompts, which `prompts.sampler` chooses."""
    group_size: int = Field(8, ge=1, le=100_000)
    """Samples per prompt."""
    steps: int = Field(10, ge=1, le=10_000)
    """Denoising steps of a rollout."""
    sampler: Component = Component(name="flow_sde")
    """Transition kernel of the trained steps."""
    solver: str = "euler"
    """Deterministic solver of the steps without noise."""
    plan: Component = Component(name="all")
    """Stochastic steps, which are stored for training; 'final' when absent with an algorithm that needs no steps."""
    same_noise: bool = False
    """All samples of a group start from the same initial noise."""
    own_noise: Annotated[float, Later()] = Field(0.0, ge=0, le=1)
    """With same_noise: individual noise in each sample's start, as a noise_level of the sampler 'cps'; 1 makes
    starts independent."""
    groups_per_shard: int | None = Field(None, ge=1)
    """Maximum groups in one committed shard, 4 when absent: the work that a crash can lose, and the unit of scoring
    during the rollout. Shards are smaller, even parts of groups, if processes would otherwise wait for each other. Does
    not change results."""
    latents_dtype: Literal["float32", "float16"] = "float32"
    """Storage precision; latents are rounded to it before their log-prob is computed."""
    unconditional: bool = False
    """Store the predictions for the negative prompt at trained steps, 4 bytes per number, so that the first update of
    an epoch need not compute them again. Only with ``optimize.guidance_gradient`` conditional."""
    store: str = "webdataset"
    """Trajectory store format: webdataset or parquet."""
    media: MediaSection = MediaSection()
    """Storage of images and clips."""
    tokens: TokensSection | None = None
    """Sampling of texts; only for causal language models."""
    engine: Annotated[Component, Later()] = Component(name="local")
    """Draws the chains of denoisers in rollouts: the policy itself, or servers (`flowmill`, `sglang`)."""


class OptimizeSection(Section):
    """The optimizer and its schedule."""

    algorithm: Component = Component(name="grpo")
    """The training objective."""
    optimizer: Annotated[str, Later()] = "adamw"
    """adamw, or adamw8bit: 8-bit moments, a quarter of the memory; rounding changes the results."""
    learning_rate: float = Field(3e-4, gt=0)
    """AdamW learning rate."""
    schedule: ScheduleSection | None = None
    """Schedule of the learning rate over the run; constant when absent."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
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
    stop_kl: Annotated[float | None, Later()] = Field(None, gt=0)
    """Undo the update after which the policy is further than this from the one before the epoch (`optimize/kl_epoch`),
    and leave out the rest of the epoch; nats per token, of denoisers in the unit of the ratio."""
    replay: ReplaySection | None = None
    """Also train on trajectories of earlier epochs."""
    guidance_gradient: Literal["conditional", "both"] = "both"
    """With guidance: differentiate both predictions, the exact gradient of the replayed log-prob, or only the
    conditional one, a different gradient that is a quarter cheaper."""
    shared_prompts: Annotated[bool, Later()] = False
    """Texts of a group share the tokens of their prompt in training: fewer tokens, the same results up to rounding."""
    ema: EmaSection | None = None
    """Keep a moving average of the weights; evaluation and export then use it."""

    def fingerprinted(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        """Return the settings that change results; see ``IDENTITIES`` for the names of algorithms."""
        values = super().fingerprinted(exclude)
        name = self.algorithm.name
        return {**values, "algorithm": {**values["algorithm"], "name": IDENTITIES.get(name, name)}}


class EvaluateSection(Section):
    """Deterministic evaluation: ODE sampling, fixed seeds, separate train and held-out prompts."""

    every: int = Field(10, ge=1)
    """Evaluate every this many epochs, and always before the first and after the last."""
    samples: int = Field(64, ge=1, le=10_000_000)
    """Images per split; if there are fewer prompts, they repeat with other seeds."""
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
    """Rewards that are reported but never optimized."""
    images: int = Field(16, ge=0)
    """Images per split in the logged grid."""


class TrackingSection(Section):
    """MLflow."""

    removed: ClassVar[Mapping[str, str]] = {
        "assets": "flowmill status RUN and flowmill store ls list artifacts; every commit is in the lineage of a run."
    }

    uri: str | None = None
    """Tracking URI; a SQLite file inside the store (for one on S3 in ./flowmill-tracking) when absent."""
    experiment: str = "flowmill"
    """MLflow experiment."""
    registered_model: str | None = None
    """Name in the model registry; "flowmill-<run name>" when absent."""
    parent: str | None = None
    """Id of the parent MLflow run, such as that of a sweep."""
    report: bool | None = None
    """Log the 'flowmill report' of a finished run; when absent, only if it runs on a lasting Prefect server."""


class StoreSection(Section):
    """Location of the artifacts."""

    root: str = "flowmill-store"
    """Folder of the artifact store, or s3://bucket/prefix."""
    cache: str | None = None
    """Folder for local copies of files on S3; a folder in the user's cache when absent."""
    cache_size: int = Field(20_000_000_000, ge=64_000_000)
    """Maximum bytes of local copies; the least recently used are removed first."""
    single_writer: bool = False
    """Only one process ever writes to this store, which allows S3 servers without conditional writes."""


class RunConfig(Section):
    """One training run."""

    removed: ClassVar[Mapping[str, str]] = {
        "export": "A run exports what it trained, adapters or the whole model. Remove it."
    }
    former: ClassVar[Mapping[str, Any]] = {"export": {"format": "auto"}}
    run: RunSection = RunSection()
    """Name, seed and length of the run."""
    store: StoreSection = StoreSection()
    """Location of the artifacts."""
    model: ModelSection
    """The base model."""
    prompts: PromptsSection
    """The prompts."""
    data: DataSection | None = None
    """Given samples to train on, instead of rollouts; their prompts are the prompts to train on."""
    rollout: RolloutSection = RolloutSection()
    """Trajectory generation."""
    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    """The optimized rewards, one or more."""
    monitors: tuple[RewardSection, ...] = ()
    """Rewards that are scored on every rollout and plotted but never optimized; a fall reveals reward hacking."""
    advantage: AdvantageSection = AdvantageSection()
    """Computation of advantages from rewards."""
    optimize: OptimizeSection = OptimizeSection()
    """The training objective and optimizer."""
    critic: CriticSection = CriticSection()
    """The critic of algorithms that learn values, such as ppo."""
    render: RenderSection | None = None
    """A frozen image model that renders the texts of a language model for the rewards."""
    evaluate: EvaluateSection = EvaluateSection()
    """Evaluation."""
    rate: RateSection = RateSection()
    """Question and guidelines of the page on which people compare samples."""
    watch: WatchSection = WatchSection()
    """Actions on alerts."""
    tracking: TrackingSection = TrackingSection()
    """MLflow."""
    execution: ExecutionSection = ExecutionSection()
    """Devices, processes and batch sizes."""

    # Not a setting: the algorithm's requirements as recorded by a run, so that a reader need not import the algorithm.
    _needs: tuple[Component, AlgorithmNeeds] | None = PrivateAttr(default=None)

    def to_yaml(self) -> str:
        """Return the config as YAML, with all defaults."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def knowing(self, algorithm: Component, needs: AlgorithmNeeds) -> Self:
        """Return the config with the recorded requirements of an algorithm."""
        copy = self.model_copy()
        copy._needs = (algorithm, needs)
        return copy

    def like(self, other: RunConfig) -> Self:
        """Return the config with another config's recorded requirements."""
        return self if other._needs is None else self.knowing(*other._needs)

    @property
    def known_needs(self) -> AlgorithmNeeds | None:
        """The recorded requirements of this config's algorithm, or None if it must be imported."""
        return self._needs[1] if self._needs is not None and self._needs[0] == self.optimize.algorithm else None

    @model_validator(mode="before")
    @classmethod
    def _as_the_algorithm_needs(cls, data: Any) -> Any:
        return with_followers(data)

    @model_validator(mode="after")
    def _prompts_to_train_on(self) -> Self:
        prompts = self.prompts
        named = prompts.train is not None or bool(prompts.sources)
        if self.data is None and not named:
            raise ValueError("prompts needs either 'train' (and maybe 'heldout') or 'sources', each with its own")
        if self.data is not None and named:
            raise ValueError("prompts.train and prompts.sources do not go with 'data', whose rows have the prompts")
        return self

    @property
    def scored(self) -> tuple[RewardSection, ...]:
        """The rewards and monitors, which score every rollout."""
        return (*self.rewards, *self.monitors)

    @property
    def samples_per_group(self) -> int:
        """The number of samples of one prompt that training can compare."""
        if self.data is None:
            return self.rollout.group_size
        return 2 if self.data.paired or self.data.rating is not None else 1
