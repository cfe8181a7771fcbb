"""What the stages of one run share in one process: store, config, lineage, and models that are loaded once."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.load import asks_for, parse_config
from configs.registry import create, resolve
from configs.schema import RewardSection, RunConfig
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.lineage import RunFolder
from storage.schema import PROMPTS, read_table
from tasks.chain import policy_after
from tasks.progress import Ledger, Reporter, Silent
from tasks.prompts import condition_key
from tasks.sources import PIPELINE, Weights, local_model, model_identity, read_weights

if TYPE_CHECKING:
    import torch

    from models.adapters import LoraSpec, Trainable
    from models.policies.base import Conditioning, Part, Policy
    from models.rewards.base import Reward
    from storage.embeddings import EmbeddingCache
    from tasks.chain import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrompt:
    """One row of a prompts artifact."""

    id: str
    """Group identity."""
    text: str
    """The prompt."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the source."""

    @property
    def condition(self) -> str:
        """What was encoded of it."""
        return condition_key(self.text, self.metadata)


class Workspace:
    """Shared state of a run's stages in one process."""

    def __init__(
        self,
        store: ArtifactStore,
        config: RunConfig,
        run: RunFolder,
        *,
        reporter: Reporter | None = None,
        epoch: int = 0,
        reads: bool = False,
    ) -> None:
        """Bind store, config and run.

        Args:
            store: the store.
            config: the run's config, or another that one stage is run with.
            run: the run.
            reporter: shows progress.
            epoch: epoch of the one stage that is run with another config.
            reads: nothing is made: base model and prompts are what the run wrote down, wherever they are now.
        """
        self.store = store
        self.config = config
        self.run = run
        self.epoch = epoch
        self.reads = reads
        self.reporter: Reporter = reporter or Silent()
        self.ledger = Ledger()
        self.decodes = True
        """Whether this process makes images; one that only trains frees the autoencoder's memory."""
        self._held: Trainable | None = None
        self._held_ref: tuple[ArtifactRef, Weights] | None = None
        self._rewards: dict[str, Reward] = {}
        self._lock = threading.Lock()

    # What the run has made so far

    @cached_property
    def chain(self) -> Chain:
        """What of the run's artifacts counts under this config."""
        from tasks.chain import Chain

        own = self.run.config()
        if own is None or asks_for(own) == asks_for(self.config.model_dump(mode="json")):
            return Chain(self)
        section = {"store": self.config.store.model_dump(mode="json")}
        config = parse_config({**own, **section}, where=f"run '{self.run.name}'")
        return Chain(self, run=Workspace(self.store, config, self.run).chain, epoch=self.epoch)

    def policy_ref(self, epoch: int) -> ArtifactRef:
        """Return the policy after an epoch; epoch 0 is the base policy."""
        return self.chain.require(*policy_after(epoch)).ref

    @cached_property
    def model_identity(self) -> dict[str, Any]:
        """What makes the base model this one. A hub id means the commit it stood for when the run began."""
        section = self.config.model
        assert section.path is not None
        local = Path(section.path).is_dir()
        for entry in [] if local else reversed(self.run.made(0, "base")):
            manifest = self.store.manifest(entry.ref)
            identity = {} if manifest is None else manifest.options.get("identity", {})
            if self.reads or identity.get("hub") == section.path:
                return dict(identity)
        return model_identity(section.path, section.revision)

    @cached_property
    def prompts_identity(self) -> str:
        """What makes the prompts these ones."""
        from tasks.preprocess import source_prompts
        from tasks.prompts import prompts_fingerprint

        record = (self.run.describe() or {}) if self.reads else {}
        known = record.get("preprocess")
        return str(known) if known is not None else prompts_fingerprint(source_prompts(self.config))

    @cached_property
    def prompts(self) -> dict[str, list[StoredPrompt]]:
        """The run's prompts by split: train, heldout, negative."""
        import json

        ref = self.chain.require(0, "preprocess").ref
        splits: dict[str, list[StoredPrompt]] = {"train": [], "heldout": [], "negative": []}
        for record in self.store.shards(ref):
            for row in read_table(self.store.files(ref, record), "prompts.parquet", PROMPTS).to_pylist():
                prompt = StoredPrompt(id=row["prompt_id"], text=row["prompt"], metadata=json.loads(row["metadata"]))
                splits[row["split"]].append(prompt)
        return splits

    # Devices and models

    @cached_property
    def device(self) -> torch.device:
        """The device models run on; CUDA devices are chosen by LOCAL_RANK under torchrun."""
        import os

        import torch

        name = self.config.execution.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda":
            name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        return torch.device(name)

    def use_threads(self) -> None:
        """Set torch's CPU threads for the calling thread; OpenMP keeps the number per thread."""
        import torch

        if self.device.type == "cpu":
            torch.set_num_threads(self.config.execution.threads)

    @cached_property
    def base_folder(self) -> Path:
        """Local folder of the base model: a built artifact, a folder, or a snapshot of a hub repository."""
        section = self.config.model
        if section.path is not None:
            commit = None if Path(section.path).is_dir() else self.model_identity.get("commit")
            return local_model(section.path, commit or section.revision)
        ref = self.chain.require(0, "base").ref
        self.store.require(ref)
        return self.store.folder(ref, self.store.shards(ref)[0]) / PIPELINE

    def load_policy(self, parts: frozenset[Part], folder: Path | None = None) -> Policy:
        """Load some parts of the base model, or of another folder of its family, fresh."""
        import torch

        from models.libraries import quiet_libraries
        from models.policies import POLICIES
        from models.policies.base import PolicySettings

        quiet_libraries()

        section = self.config.model
        settings = PolicySettings(
            height=section.height,
            width=section.width,
            guidance_scale=section.guidance_scale,
            dtype=getattr(torch, section.dtype),
            device=self.device,
            train_negative=self.config.optimize.guidance_gradient == "both",
            gradient_checkpointing=section.gradient_checkpointing,
            frames=section.frames,
            attention=section.attention,
            device_map=section.device_map,
            compile=section.compile,
        )
        family = resolve(POLICIES, section.policy, what="model.policy")
        return family.load(folder or self.base_folder, settings, parts, section.options)  # type: ignore[no-any-return]

    def trainable(self, ref: ArtifactRef, weights: Weights = Weights.TRAINED) -> Trainable:
        """Return the policy with weights of a policy artifact; denoiser and VAE are loaded once per process."""
        with self._lock:
            if self._held is None:
                self._held = self._fresh_trainable()
                self._held_ref = None
            if self._held_ref != (ref, weights):
                values = read_weights(self.store, ref, weights)
                self._held.load(values if values is not None else self._base_weights())
                self._held_ref = (ref, weights)
            return self._held

    def starting_weights(self, ref: ArtifactRef) -> list[torch.Tensor]:
        """Return the trained parameters of a policy artifact in parameter order, beside those being trained."""
        assert self._held is not None
        values = read_weights(self.store, ref, Weights.TRAINED)
        values = values if values is not None else self._base_weights()
        return [values[name].to(p.device) for name, p in self._held.named_parameters()]

    def forget_weights(self) -> None:
        """Say that the loaded policy was trained in place, so its weights belong to no artifact."""
        self._held_ref = None

    def fresh_state(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters before any training, from a freshly loaded model."""
        with self._lock:
            if self._held is None:
                self._held = self._fresh_trainable()
            return self._held.state() if self._held_ref is None else self._fresh_trainable().state()

    def give_reference(self, trainable: Trainable) -> None:
        """Load the frozen base denoisers that full weights are compared with, unless they are there already."""
        from models.policies.base import Part

        if trainable.needs_reference:
            trainable.set_reference(self.load_policy(frozenset({Part.DENOISER})).denoisers)

    def lora_spec(self, policy: Policy) -> LoraSpec | None:
        """Return the LoRA settings with the family's published targets filled in."""
        from models.adapters import LoraSpec

        section = self.config.model.lora
        if section is None:
            return None
        return LoraSpec(rank=section.rank, alpha=section.alpha, targets=section.targets or policy.lora_targets)

    def give_teacher(self, trainable: Trainable, folder: str) -> None:
        """Load the frozen denoisers of another model of the family."""
        from models.policies.base import Part

        trainable.set_teacher(self.load_policy(frozenset({Part.DENOISER}), local_model(folder, None)).denoisers)

    def _fresh_trainable(self) -> Trainable:
        from models.adapters import Trainable
        from models.policies.base import Part
        from tasks.seeds import derive

        policy = self.load_policy(frozenset({Part.DENOISER, Part.VAE}))
        if not self.decodes:
            policy.release_decoder()
        return Trainable(policy, self.lora_spec(policy), seed=derive(self.config.run.seed, "lora"))

    def _base_weights(self) -> dict[str, torch.Tensor]:
        from models.adapters import Trainable
        from models.policies.base import Part

        return Trainable(self.load_policy(frozenset({Part.DENOISER})), None, seed=0).state()

    # Conditioning

    @cached_property
    def embeddings(self) -> EmbeddingCache:
        """The run's embedding cache."""
        from storage.embeddings import EmbeddingCache

        return EmbeddingCache(self.store, self.chain.require(0, "encode").ref)

    def conditioning(self, prompts: Sequence[StoredPrompt]) -> Conditioning:
        """Return one row per prompt, each with its negative when guidance is on."""
        import torch

        from models.policies.base import Conditioning

        dtype = getattr(torch, self.config.model.dtype)

        def tensors(rows: Sequence[str]) -> dict[str, torch.Tensor]:
            loaded = {name: torch.from_numpy(array) for name, array in self.embeddings.load(rows).items()}
            # Positions, lengths and masks are whole numbers, which bfloat16 has only up to 256.
            return {k: v.to(self.device, dtype if v.is_floating_point() else v.dtype) for k, v in loaded.items()}

        positive = tensors([prompt.condition for prompt in prompts])
        if not uses_guidance(self.config):
            return Conditioning(positive)
        text = self.config.model.negative_prompt
        return Conditioning(positive, tensors([condition_key(text, prompt.metadata) for prompt in prompts]))

    @cached_property
    def prompts_by_id(self) -> dict[str, StoredPrompt]:
        """The run's prompts of all splits."""
        return {prompt.id: prompt for split in self.prompts.values() for prompt in split}

    # Rewards

    def reward(self, section: RewardSection) -> Reward:
        """Return a reward, made once per process."""
        from models.rewards import REWARDS

        with self._lock:
            if section.slot not in self._rewards:
                self._rewards[section.slot] = create(REWARDS, section.name, section.options, what="reward")
            return self._rewards[section.slot]

    def use_rewards(self, made: Mapping[str, Reward]) -> None:
        """Take rewards that were made already, by slot."""
        self._rewards.update(made)

    def reward_section(self, slot: str, *, judges: bool = False) -> RewardSection:
        """Return the reward, or with ``judges`` also the judge, of a slot.

        Raises:
            ConfigError: none of the config has this slot.
        """
        sections = [*self.config.rewards, *(self.config.evaluate.judges if judges else ())]
        for section in sections:
            if section.slot == slot:
                return section
        slots = ", ".join(section.slot for section in sections)
        raise ConfigError(f"rewards: there is no reward '{slot}' in this config; it has {slots}.")


def uses_guidance(config: RunConfig) -> bool:
    """Return whether guidance takes a negative prompt: when its scale is above 1 and not an input of the model."""
    from models.policies import EMBEDDED_GUIDANCE

    return config.model.guidance_scale > 1 and config.model.policy not in EMBEDDED_GUIDANCE
