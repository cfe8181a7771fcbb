"""What the stages of one run share in one process: store, config, lineage, prompts, and who shows progress."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.load import asks_for, parse_config
from configs.rewards import RewardSection
from configs.schema import RunConfig
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.lineage import RunFolder
from storage.tables import read_rows
from tasks.chain import policy_after
from tasks.progress import Ledger, Reporter, Silent
from tasks.prompts import Prompt, StoredPrompt, prompts_fingerprint, source_prompts
from tasks.recent import Recent
from tasks.sources import PIPELINE, local_model, model_identity

if TYPE_CHECKING:
    from storage.embeddings import EmbeddingCache
    from tasks.chain import Chain
    from tasks.execution.crew import Crew
    from tasks.execution.host import ModelHost


class RunContext:
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
        self.recent = Recent()
        self._caches: dict[ArtifactRef, EmbeddingCache] = {}

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
        return Chain(self, run=RunContext(self.store, config, self.run).chain, epoch=self.epoch)

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
    def source_prompts(self) -> dict[str, list[Prompt]]:
        """The prompts the config names, by split."""
        return source_prompts(self.config)

    @cached_property
    def distinct_prompts(self) -> dict[str, Prompt]:
        """What is to be encoded, by what is encoded of it."""
        return {prompt.condition: prompt for split in self.source_prompts.values() for prompt in split}

    @cached_property
    def prompts_identity(self) -> str:
        """What makes the prompts these ones."""
        record = (self.run.describe() or {}) if self.reads else {}
        known = record.get("preprocess")
        return str(known) if known is not None else prompts_fingerprint(self.source_prompts)

    @cached_property
    def prompts(self) -> dict[str, list[StoredPrompt]]:
        """The run's prompts by split: train, heldout, negative."""
        import json

        ref = self.chain.require(0, "preprocess").ref
        splits: dict[str, list[StoredPrompt]] = {"train": [], "heldout": [], "negative": []}
        for row in read_rows(self.store, ref).to_pylist():
            prompt = StoredPrompt(id=row["prompt_id"], text=row["prompt"], metadata=json.loads(row["metadata"]))
            splits[row["split"]].append(prompt)
        return splits

    # Models

    @cached_property
    def host(self) -> ModelHost:
        """What holds the run's models in this process."""
        from tasks.execution.host import ModelHost

        return ModelHost(self)

    @cached_property
    def crew(self) -> Crew:
        """The run's resident ranks, where several processes work together."""
        from tasks.execution.crew import Crew

        return Crew(self)

    def begin_epoch(self) -> None:
        """Start the ranks anew if they have stayed long enough."""
        if "crew" in vars(self):
            self.crew.begin_epoch()

    def refresh(self) -> None:
        """Look again at what the run has made, which other processes go on with."""
        self.run.refresh()
        vars(self).pop("chain", None)

    def close(self) -> None:
        """Release models and ranks; what is asked for later is loaded and started again."""
        if "host" in vars(self):
            self.host.release()
        if "crew" in vars(self):
            self.crew.close()

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

    @cached_property
    def embeddings(self) -> EmbeddingCache:
        """The run's embedding cache."""
        return self.embedding_cache(self.chain.require(0, "encode").ref)

    def embedding_cache(self, ref: ArtifactRef) -> EmbeddingCache:
        """Return the embedding cache of an encoder; what it has read of its tables is kept."""
        from storage.embeddings import EmbeddingCache

        return self._caches.setdefault(ref, EmbeddingCache(self.store, ref))

    @cached_property
    def prompts_by_id(self) -> dict[str, StoredPrompt]:
        """The run's prompts of all splits."""
        return {prompt.id: prompt for split in self.prompts.values() for prompt in split}

    def reward_section(self, slot: str, *, judges: bool = False) -> RewardSection:
        """Return the reward or monitor, or with ``judges`` the reward or judge, of a slot.

        Raises:
            ConfigError: none of the config has this slot.
        """
        sections = [*self.config.rewards, *(self.config.evaluate.judges if judges else self.config.monitors)]
        for section in sections:
            if section.slot == slot:
                return section
        slots = ", ".join(section.slot for section in sections)
        raise ConfigError(f"rewards: there is no reward '{slot}' in this config; it has {slots}.")
