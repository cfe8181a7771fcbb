"""Shared state of one run's stages in one process: config, store, artifacts and progress reporter."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowmill.configs.errors import NotCommittedError
from flowmill.configs.load import asks_for, parse_config
from flowmill.configs.model import ModelSection
from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.inputs.prompts import HELD_OUT_ROWS, StoredPrompt, image_column, image_files, image_keys
from flowmill.tasks.inputs.renderer import render_of
from flowmill.tasks.inputs.weight_sources import Weights, exported_folder, source_folder, weight_files
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.moves import as_requested, moved
from flowmill.tasks.runs.progress import Ledger, Reporter, Silent
from flowmill.tasks.runs.start import started_from
from flowmill.tasks.specs.graph import RENDERER, policy_after
from flowmill.tasks.specs.run_inputs import RunInputs

if TYPE_CHECKING:
    from flowmill.storage.trajectories.embeddings import EmbeddingCache
    from flowmill.storage.trajectories.source_images import ReferenceFiles


class RunContext(RunInputs):
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
            config: the run's config, or another config for one stage.
            reporter: shows progress.
            epoch: epoch of the one stage that runs with another config.
            reads: read-only: base model and prompts are the recorded ones, even if their files have moved.
        """
        super().__init__(store, config, run, reads=reads)
        self.epoch = epoch
        self.reporter: Reporter = reporter or Silent()
        self.ledger = Ledger()
        self.recent = Recent()
        self._caches: dict[ArtifactRef, EmbeddingCache] = {}

    @cached_property
    def chain(self) -> Chain:
        """The artifacts of the run that count under this config."""
        own = self.run.config()
        if own is None:
            return Chain(self)
        section = {"store": self.config.store.model_dump(mode="json")}
        # A config written by an earlier version may lack settings that now have a default.
        config = parse_config({**own, **section}, where=f"run '{self.run.name}'").like(self.config)
        if not self.reads:
            config = as_requested(config, moved(self.store, self.run, config, self.config))
        if _asks_for(config) == _asks_for(self.config):
            return Chain(self)
        own_inputs = RunInputs(self.store, config, self.run, reads=self.reads)
        # A refit in between must not give the two chains different fits.
        own_inputs.contents.fits = self.contents.fits
        return Chain(self, run=Chain(own_inputs), epoch=self.epoch)

    def find_start(self) -> Mapping[str, Any]:
        """Return the policy to start from, of a run that has not begun."""
        return started_from(self.store, self.config)

    @property
    def start_files(self) -> list[Path] | None:
        """The files of the weights that the run starts from, in its own first policy; None: those of the base model."""
        if self.config.model.start is None:
            return None
        return weight_files(self.store, self.policy_ref(0), Weights.TRAINED)

    def policy_ref(self, epoch: int) -> ArtifactRef:
        """Return the policy after an epoch; epoch 0 is the base policy."""
        return self.chain.require(*policy_after(epoch)).ref

    @cached_property
    def prompts(self) -> dict[str, list[StoredPrompt]]:
        """The run's prompts by split: train, heldout, negative, and those of held-out rows."""
        ref = self.chain.require(0, "preprocess").ref
        splits: dict[str, list[StoredPrompt]] = {"train": [], "heldout": [], "negative": [], HELD_OUT_ROWS: []}
        for row in read_rows(self.store, ref).to_pylist():
            prompt = StoredPrompt(id=row["prompt_id"], text=row["prompt"], metadata=json.loads(row["metadata"]))
            splits[row["split"]].append(prompt)
        return splits

    @cached_property
    def prompts_by_id(self) -> dict[str, StoredPrompt]:
        """The run's prompts of all splits."""
        return {prompt.id: prompt for split in self.prompts.values() for prompt in split}

    def references(self, metadata: Sequence[Mapping[str, Any]], *, frames: int = 0) -> list[list[np.ndarray]]:
        """Return the input images of prompts, by their metadata: read-only (H, W, 3) uint8 arrays.

        Equal prompts share the same arrays. A clip gives its first frame; with ``frames`` that many frames, and an
        image is repeated. If an earlier version did not store the images, they are read from the prompt files; image
        names are content hashes, so the images are the same.
        """
        from flowmill.tasks.inputs.prompt_rows import frames_of, picture_of

        listed = [image_keys(one) for one in metadata]
        keys = dict.fromkeys(key for keys in listed for key in keys)
        files = self._source_images(keys) if self._reference_files.empty else self._reference_files.read(keys)
        where = self._reference_files.where
        if frames:
            films = {key: frames_of(data, key, where, frames) for key, data in files.items()}
            return [[frame for key in keys for frame in films[key]] for keys in listed]
        seen = {key: picture_of(data, key, where) for key, data in files.items()}
        return [[seen[key] for key in keys] for keys in listed]

    def _source_images(self, keys: Iterable[str]) -> dict[str, bytes]:
        from flowmill.tasks.inputs.prompt_rows import image_data

        paths = image_files(prompt for split in self.source_prompts.values() for prompt in split)
        for key in keys:
            if key not in paths:
                raise NotCommittedError(
                    f"Image {key}, which a prompt starts from, is neither in {self._reference_files.where} nor among "
                    "the images of the prompt files, as they are now. Put it back below the prompt file."
                )
        return {key: image_data(paths[key], key) for key in keys}

    @property
    def holds_references(self) -> bool:
        """Whether the run's prompts artifact holds the input images of the prompts."""
        return image_column(self.config) is not None and not self._reference_files.empty

    @cached_property
    def _reference_files(self) -> ReferenceFiles:
        # Imported late: most runs have no images, and this module imports Arrow.
        from flowmill.storage.trajectories.source_images import ReferenceFiles

        return ReferenceFiles(self.store, self.chain.require(0, "preprocess").ref)

    @cached_property
    def base_folder(self) -> Path:
        """Local folder of the base model: a built artifact, a folder, or a snapshot of a hub repository."""
        return self._folder_of(self.config.model, "")

    @cached_property
    def renderer_folder(self) -> Path:
        """Local folder of the model that renders texts."""
        return self._folder_of(render_of(self.config).model, RENDERER)

    def _folder_of(self, section: ModelSection, slot: str) -> Path:
        if section.path is not None and not section.single_files:
            return self.source_folder(section, slot)
        return exported_folder(self.store, self.chain.require(0, "base", slot).ref)

    def source_folder(self, section: ModelSection, slot: str) -> Path:
        """Return the local folder or snapshot of a model of the config, without the content of single files."""
        local = Path(str(section.path)).is_dir()
        identity = {} if local else self.renderer_identity if slot else self.model_identity
        return source_folder(section, identity.get("commit"))

    @cached_property
    def embeddings(self) -> EmbeddingCache:
        """The run's embedding cache."""
        return self.embedding_cache(self.chain.require(0, "encode").ref)

    def embedding_cache(self, ref: ArtifactRef) -> EmbeddingCache:
        """Return the embedding cache of an encoder; tables it has read stay in memory."""
        from flowmill.storage.trajectories.embeddings import EmbeddingCache

        return self._caches.setdefault(ref, EmbeddingCache(self.store, ref))

    def refresh(self) -> None:
        """Read the run's records again, because other processes add to them."""
        self.run.refresh()
        vars(self).pop("chain", None)


def _asks_for(config: RunConfig) -> dict[str, Any]:
    return asks_for(config.model_dump(mode="json"))


#: Most bytes to keep; the oldest shards are dropped first, and are decoded when requested.
_LIMIT = 128 << 20


class Recent:
    """Images or clips of the newest artifact of each kind, by shard; safe for several threads."""

    def __init__(self, limit: int = _LIMIT) -> None:
        """Start empty; ``limit`` is the most bytes to keep."""
        self._limit = limit
        self._shards: OrderedDict[tuple[ArtifactRef, str], list[np.ndarray]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def begin(self, ref: ArtifactRef, shard: str, *, exact: bool) -> Callable[[Iterable[np.ndarray]], None]:
        """Return a function that caches a shard's next rows: (H, W, 3) images or (F, H, W, 3) clips, uint8.

        Args:
            ref: the artifact; other artifacts of its kind are dropped.
            shard: the shard; rows of an earlier attempt are dropped.
            exact: whether storage is lossless; otherwise no rows are cached.
        """
        key = (ref, shard)
        with self._lock:
            for cached in [*self._shards]:
                if cached == key or (cached[0].kind == ref.kind and cached[0] != ref):
                    self._drop(cached)
            if exact:
                self._shards[key] = []

        def add(media: Iterable[np.ndarray]) -> None:
            with self._lock:
                if key not in self._shards:
                    # Storage is not lossless, or the shard was dropped.
                    return
                new = [*media]
                self._shards[key] += new
                self._size += sum(each.nbytes for each in new)
                while self._size > self._limit:
                    self._drop(next(iter(self._shards)))

        return add

    def forget(self, ref: ArtifactRef, shard: str) -> None:
        """Drop a shard that another process has committed."""
        with self._lock:
            if (ref, shard) in self._shards:
                self._drop((ref, shard))

    def find(self, ref: ArtifactRef, shard: str, rows: int) -> list[np.ndarray] | None:
        """Return the media of a shard if those of all its rows are cached, else None."""
        with self._lock:
            cached = self._shards.get((ref, shard), [])
            return [*cached] if cached and len(cached) == rows else None

    def _drop(self, key: tuple[ArtifactRef, str]) -> None:
        self._size -= sum(each.nbytes for each in self._shards.pop(key))
