"""Fits of a store that options of rewards name (``flowmill.configs.path_types.FitPlace``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from flowmill.configs.components import reward_sections
from flowmill.configs.errors import ConfigError
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig, StoreSection
from flowmill.configs.suggestions import did_you_mean
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.fit_names import fits_of, is_lost, list_fits
from flowmill.storage.backends import may_exist
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.names import part
from flowmill.tasks.inputs.option_paths import PathContent, reward_places

_REMEDY = "Fit it first, in the same store: 'flowmill reward fit'."


class Fits:
    """The fits that rewards name; each is looked up once, so that a refit does not change rewards in use.

    Other processes of a run ``adopt`` those of its own process.
    """

    def __init__(self, store: ArtifactStore | StoreSection) -> None:
        """Bind to a store, which is opened when a fit is looked up."""
        self._source = store
        self._cached: dict[str, ArtifactRef] = {}
        self._folders: dict[ArtifactRef, str] = {}

    @cached_property
    def _store(self) -> ArtifactStore:
        return self._source if isinstance(self._source, ArtifactStore) else ArtifactStore(self._source)

    def artifact(self, named: str) -> ArtifactRef:
        """Return the newest finished fit of NAME, or fit N of NAME@N."""
        if named not in self._cached:
            self._cached[named] = self._newest(named)
        return self._cached[named]

    def resolved(self, config: RunConfig) -> dict[str, str]:
        """Return the artifacts ``kind/id`` of the fits that a config names, by name; without those that cannot be
        used."""
        return {named: str(self.artifact(named)) for named in _spelled(config) if not self.lacking(named)}

    def adopt(self, resolved: Mapping[str, str]) -> None:
        """Use these artifacts for these names, as another process of the run does."""
        self._cached |= {named: ArtifactRef.parse(ref) for named, ref in resolved.items()}

    def _newest(self, named: str) -> ArtifactRef:
        (name, at, number), root = named.partition("@"), self._source.root
        where = f"in '{root if isinstance(root, str) else root.uri}'"
        try:
            part(name)
        except ValueError as error:
            raise ConfigError(f"'{named}' names no fit: {error}. Name one as NAME or NAME@NUMBER.") from None
        if isinstance(self._source, StoreSection) and not may_exist(self._source):
            raise ConfigError(f"there is no fit '{name}' {where}: the store does not exist yet. {_REMEDY}")
        store = self._store
        fits = fits_of(store, name)
        if not fits:
            names = list_fits(store)
            raise ConfigError(f"there is no fit '{name}' {where}. {did_you_mean(name, names) if names else _REMEDY}")
        if at and not (number.isdecimal() and int(number) in fits):
            raise ConfigError(f"there is no fit '{named}' {where}; there are {', '.join(f'{name}@{n}' for n in fits)}.")
        for each, ref in reversed({int(number): fits[int(number)]}.items() if at else fits.items()):
            if store.manifest(ref) is not None:
                return ref
            if is_lost(store, ref):
                raise ConfigError(
                    f"the fit '{name}@{each}' {where} is lost: its artifact {ref} is not there. Give its "
                    "'flowmill reward fit' command again, restore it from a copy of the store, or name another fit as "
                    "NAME@NUMBER."
                )
        raise ConfigError(
            f"the fit '{named}' {where} has not finished. Give its 'flowmill reward fit' command again: it goes on "
            "from its last checkpoint."
        )

    def lacking(self, named: str) -> str:
        """Return the complaint on a fit; '' if it can be used."""
        try:
            self.artifact(named)
        except ConfigError as error:
            return str(error)
        return ""

    def content_of(self, named: str) -> PathContent | None:
        """Return the content of a fit; None if there is none."""
        try:
            record = self._store.shards(self.artifact(named))[0]
        except ConfigError:
            return None
        return PathContent(record.digest, int(1e9 * float(record.producer.get("started", 0))))

    def located(self, section: RewardSection) -> RewardSection:
        """Return a reward with the folders of the fits that it names, on this machine."""
        options: Mapping[str, Any] = section.options
        for place in reward_places(section):
            if place.is_fit:
                try:
                    ref = self.artifact(place.path)
                except ConfigError as error:
                    raise ConfigError(f"reward '{section.slot}': {error}") from None
                if ref not in self._folders:
                    self._folders[ref] = str(self._store.folder(ref, self._store.shards(ref)[0]))
                options = _placed(options, place.option.split("."), self._folders[ref])
        return section if options is section.options else section.model_copy(update={"options": options})


def _placed(options: Mapping[str, Any], keys: list[str], folder: str) -> dict[str, Any]:
    """Return options with the folder of a fit in place of its name; with both, the reward refuses them."""
    key, *below = keys
    if below:
        return {**options, key: _placed(options[key], below, folder)}
    others = {name: value for name, value in options.items() if name != key}
    return dict(options) if "path" in options else {**others, "path": folder}


def named_fits(config: RunConfig) -> list[str]:
    """Return the names of the fits that rewards, monitors and judges of a config use."""
    return sorted({named.partition("@")[0] for named in _spelled(config)})


def _spelled(config: RunConfig) -> list[str]:
    """Return the fits of a config as NAME or NAME@NUMBER."""
    places = (place for section in reward_sections(config) for place in reward_places(section))
    return sorted({place.path for place in places if place.is_fit})
