"""Digests of the files and folders that options of components name, as part of the artifacts computed with them.

Another file at the same path gives other scores, so contents count and not paths. Digests are stored with artifacts, so
they stay recorded after the files are removed, and on other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from flowmill.configs.errors import ConfigError
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import LineageEntry, RunFolder
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.fits import Fits
from flowmill.tasks.inputs.option_paths import (
    Metadata,
    OptionPath,
    PathContent,
    algorithm_places,
    config_places,
    content_of,
    reward_places,
)
from flowmill.tasks.inputs.store_trust import is_set_here
from flowmill.tasks.specs.graph import Node

#: Key of the digests by path, in the options of manifests.
CONTENTS = "contents"

#: Digests by path, as options of a config spell it.
Digests = Mapping[str, str]


class InputContents:
    """Digests of the files of one run; each file is read once."""

    def __init__(
        self, store: ArtifactStore, run: RunFolder, config: RunConfig, metadata: Callable[[], Metadata], *, reads: bool
    ) -> None:
        """Bind to a run.

        Args:
            config: its config, or another that one stage is run with.
            metadata: gives the metadata of all prompts.
            reads: nothing is computed: only files that a config on this machine named are read, and no prompts.
        """
        self._store, self._run, self._config, self._metadata = store, run, config, metadata
        self._reads = reads
        self.fits = Fits(store)
        """The fits that rewards name."""
        self._looked: dict[tuple[str, ...], PathContent | None] = {}

    def of(self, node: Node, places: Sequence[OptionPath], made_as: Callable[[Digests], str]) -> Digests:
        """Return the digests that belong to a stage's artifact: of present files, else as recorded.

        Artifacts from before contents counted stay valid while no file changed since; there are no digests then.

        Args:
            places: the files and folders that its options name.
            made_as: gives the fingerprint of the stage's work with some digests.
        """
        here, gone = self._look(places)
        now = {path: each.digest for path, each in here.items()}
        entries = self._run.entries_of(*node)
        computed = {entry.ref.fingerprint for entry in entries}
        digests = {**now, **self._recorded_of(gone)}
        if not entries or made_as(digests) in computed:
            return digests
        if gone:
            recorded = self._contents_of(entries[-1])
            digests = {**now, **{path: recorded[path] for path in gone if path in recorded}}
        plain = made_as({})
        attempts = [entry.ref for entry in entries if entry.ref.fingerprint == plain]
        return {} if attempts and self._unchanged_since(here.values(), attempts[-1]) else digests

    def then(self, node: Node, contents: Digests) -> Mapping[str, str]:
        """Return the recorded path of each file that has moved since a stage was computed, by its present path."""
        entries = self._run.entries_of(*node)
        recorded = self._contents_of(entries[-1]) if entries else {}
        by_digest = {digest: path for path, digest in recorded.items() if path not in contents}
        return {path: by_digest[each] for path, each in contents.items() if path not in recorded and each in by_digest}

    def is_made(self, node: Node, work: str) -> bool:
        """Return whether the run has an artifact of a stage with this fingerprint."""
        return any(entry.ref.fingerprint == work for entry in self._run.entries_of(*node))

    @cached_property
    def by_setting(self) -> dict[str, dict[str, str]]:
        """The digests of the files of all components of the config, by setting; as recorded where a file is gone."""
        by_setting: dict[str, dict[str, str]] = {}
        for setting, places in config_places(self._config).items():
            here, gone = self._look(places)
            by_setting[setting] = {
                **{path: each.digest for path, each in here.items()},
                **self._recorded_of(gone),
            }
        return {setting: digests for setting, digests in by_setting.items() if digests}

    def adopt(self, fits: Mapping[str, str], by_setting: Mapping[str, Digests]) -> None:
        """Use the fits and ``by_setting`` of the run's own process, rather than look again."""
        self.fits.adopt(fits)
        vars(self)["by_setting"] = by_setting

    def check_reward(self, section: RewardSection) -> None:
        """Check that the files that a reward is about to read are those whose digests the run's artifacts have.

        Raises:
            ConfigError: one has other contents now, or on this machine.
        """
        # Servers read files of their own.
        self._check(reward_places(section) if section.server is None else ())

    def check_algorithm(self) -> None:
        """Check the same of the models that the algorithm is about to read."""
        self._check(algorithm_places(self._config))

    def _check(self, places: Iterable[OptionPath]) -> None:
        named = config_places(self._config)
        for place in places:
            known = {self.by_setting.get(setting, {}).get(place.path) for setting in named if place in named[setting]}
            # Files that prompts name are read when their samples are scored.
            now = None if place.column is not None else content_of(place, tuple)
            if now is not None and known - {None, now.digest}:
                raise contents_error(str(place))

    def _look(self, places: Sequence[OptionPath]) -> tuple[dict[str, PathContent], list[str]]:
        """Return the present files by path, and the paths of files that may have existed."""
        here = {place.path: content for place in places if (content := self._here(place)) is not None}
        # A hub id to be loaded is no folder.
        gone = [place for place in places if place.path not in here and (self._reads or not place.may_be_hub)]
        return here, [place.path for place in gone]

    def _here(self, place: OptionPath) -> PathContent | None:
        key = (place.component.name, place.option, place.path, place.kind, place.column or "")
        if place.is_fit:
            return self.fits.content_of(place.path)
        if key not in self._looked:
            self._looked[key] = content_of(place, self._metadata) if self._may_look(place) else None
        return self._looked[key]

    def _may_look(self, place: OptionPath) -> bool:
        # A store's config must not choose files to read on a machine where it was never specified.
        allowed = not self._reads or is_set_here(place.component, place.option.partition(".")[0])
        return allowed and not (self._reads and place.column is not None)

    @cached_property
    def recorded(self) -> Digests:
        """Digests by path recorded in the run's artifacts: the newest of each stage and slot."""
        newest = {(entry.stage, entry.slot): entry for entry in self._run.entries()}
        digests = dict[str, str]()
        for entry in sorted(newest.values(), key=lambda entry: entry.epoch):
            digests.update(self._contents_of(entry))
        return digests

    def _recorded_of(self, paths: Sequence[str]) -> Digests:
        return {path: self.recorded[path] for path in paths if path in self.recorded}

    def _contents_of(self, entry: LineageEntry) -> Digests:
        manifest = None if entry.ref.kind == "embeddings" else self._store.manifest(entry.ref)
        return {} if manifest is None else dict(manifest.options.get(CONTENTS, {}))

    def _unchanged_since(self, here: Iterable[PathContent], ref: ArtifactRef) -> bool:
        """Return whether nothing changed since the first shard of an artifact was begun."""
        manifest = self._store.manifest(ref)
        record = self._store.record(ref, manifest.shards[0][0]) if manifest is not None and manifest.shards else None
        if record is None:
            return False
        began_ns = float(record.producer.get("started", 0)) * 1e9
        return all(each.changed_ns <= began_ns for each in here)


def contents_error(source: str) -> ConfigError:
    """Return the error of a file or folder that differs from the one that the run's artifacts name."""
    return ConfigError(
        f"{source} has other contents than the run was started with, and its results would be recorded as those of the "
        "former contents. Give the same command again; on another machine, copy the same files there."
    )
