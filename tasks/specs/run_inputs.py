"""The inputs of a run: store, config, lineage, and the identities of the models and prompts that the config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, NotCommittedError
from configs.model import ModelSection
from configs.rewards import RewardSection
from configs.schema import RunConfig
from storage.artifacts.commit import ArtifactStore
from storage.artifacts.lineage import RunFolder
from tasks.inputs.data_sources import is_there
from tasks.inputs.given_data import data_of, given_data
from tasks.inputs.prompts import Prompt
from tasks.inputs.renderer import render_of
from tasks.inputs.source_prompts import prompts_fingerprint, source_prompts
from tasks.inputs.weight_sources import (
    adapter_identity,
    checkpoint_identity,
    critic_folder,
    held_in_files,
    model_identity,
    single_file_identity,
)
from tasks.specs.graph import RENDERER
from tasks.specs.input_hashes import Contents
from tasks.specs.plan import RunPlan

#: Key of the critic's initial model in options of stages, where that is not the base model.
_CRITIC = "critic_base"


class RunInputs:
    """Store, config and run, with the identities of inputs outside the store."""

    def __init__(self, store: ArtifactStore, config: RunConfig, run: RunFolder, *, reads: bool = False) -> None:
        """Bind store, config and run.

        Args:
            store: the store.
            config: the run's config, or another that one stage is run with.
            run: the run.
            reads: nothing is made: identities of base model and prompts are as recorded in the run.
        """
        self.store = store
        self.config = config
        self.run = run
        self.reads = reads

    @cached_property
    def plan(self) -> RunPlan:
        """The plan that the config resolves to."""
        return RunPlan(self.config)

    @cached_property
    def model_identity(self) -> dict[str, Any]:
        """Identity of the base model. A hub id means its commit at the start of the run."""
        return self._identity_of(self.config.model, "")

    @cached_property
    def checkpoint_identity(self) -> dict[str, str]:
        """Identity of the checkpoint that training starts from; as recorded if its folder is gone."""
        folder = Path(str(self.config.model.checkpoint))
        known = self._recorded_start("checkpoint") if self.reads or not folder.is_dir() else None
        return known or checkpoint_identity(folder)

    @cached_property
    def adapter_identity(self) -> dict[str, str]:
        """Identity of the adapters that training starts from; as recorded if their file is gone."""
        lora = self.config.model.lora
        assert lora is not None
        path = Path(str(lora.start))
        known = self._recorded_start("start") if self.reads or not path.expanduser().exists() else None
        return known or adapter_identity(path)

    @cached_property
    def start(self) -> Mapping[str, Any]:
        """The policy of another run that this one starts from, see ``tasks.runs.start``; as recorded at its begin."""
        return (self.run.describe() or {}).get("start") or self._recorded_start("start") or self.find_start()

    @property
    def starts_from(self) -> dict[str, str] | None:
        """The run and the policy that the run starts from, as RUN@EPOCH and ``kind/id``."""
        section = self.config.model
        return None if section.start is None else {"run": section.start, "policy": self.start["policy"]}

    def find_start(self) -> Mapping[str, Any]:
        """Return the policy to start from, of a run without a record of it.

        Raises:
            NotCommittedError: only a run that begins can.
        """
        raise NotCommittedError(f"Run '{self.run.name}' has lost its first record. Start it again with its config.")

    def _recorded_start(self, name: str) -> dict[str, str] | None:
        for entry in reversed(self.run.made(0, "policy")):
            manifest = self.store.manifest(entry.ref)
            if manifest is not None and name in manifest.options:
                return dict(manifest.options[name])
        return None

    @cached_property
    def renderer_identity(self) -> dict[str, Any]:
        """Identity of the model that renders texts."""
        return self._identity_of(render_of(self.config).model, RENDERER)

    @cached_property
    def critic_identity(self) -> dict[str, Any]:
        """Identity of the critic's initial model, if it is not the base model; as recorded if its folder is gone.

        Raises:
            ConfigError: there is no such folder, and there never was.
        """
        path = self.config.critic.path
        assert path is not None
        for entry in reversed(self.run.made(1, "value")) if self.reads or not Path(path).expanduser().is_dir() else ():
            manifest = self.store.manifest(entry.ref)
            if manifest is not None and _CRITIC in manifest.options:
                return dict(manifest.options[_CRITIC])
        return model_identity(str(critic_folder(path)), None)

    def _identity_of(self, section: ModelSection, slot: str) -> dict[str, Any]:
        assert section.path is not None
        local = Path(section.path).is_dir()
        for entry in [] if local else reversed(self.run.made(0, "base", slot)):
            manifest = self.store.manifest(entry.ref)
            identity = {} if manifest is None else manifest.options.get("identity", {})
            if self.reads or identity.get("hub") == section.path:
                return dict(identity)
        return model_identity(section.path, section.revision, without=held_in_files(section))

    def single_file_identity(self, section: ModelSection, slot: str) -> dict[str, str]:
        """Return the identity of single files; as recorded if one is gone.

        Args:
            section: the section of their model.
            slot: the slot of that model.

        Raises:
            ConfigError: one is gone and was never read.
        """
        there = all(Path(file).expanduser().is_file() for file in section.single_files.values())
        for entry in reversed(self.run.made(0, "base", slot)) if self.reads or not there else ():
            manifest = self.store.manifest(entry.ref)
            if manifest is not None and "single_file" in manifest.options:
                return dict(manifest.options["single_file"])
        return single_file_identity(section)

    @cached_property
    def source_prompts(self) -> dict[str, Sequence[Prompt]]:
        """The prompts the config names, by split."""
        return source_prompts(self.config)

    def data_identity(self, slot: str) -> str:
        """Return the identity of given samples, or with a slot of the held-out ones; as recorded if the run is only
        read, or their source is gone."""
        section = data_of(self.config)
        source = str(section.heldout if slot else section.train)
        for entry in reversed(self.run.made(0, "ingest", slot)) if self.reads or not is_there(source) else ():
            manifest = self.store.manifest(entry.ref)
            if manifest is not None:
                return str(manifest.options["data"])
        return given_data(self.config, heldout=bool(slot)).identity

    @cached_property
    def contents(self) -> Contents:
        """Digests of the files and folders that options of components name."""
        return Contents(self.store, self.run, self.config, self.metadata, reads=self.reads)

    def metadata(self) -> list[Mapping[str, Any]]:
        """Return the metadata of all prompts that the config names."""
        return [prompt.metadata for prompts in self.source_prompts.values() for prompt in prompts]

    @cached_property
    def prompts_identity(self) -> str:
        """Identity of the prompts."""
        record = (self.run.describe() or {}) if self.reads else {}
        known = record.get("preprocess")
        return str(known) if known is not None else prompts_fingerprint(self.source_prompts)

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


def critic_identity(facts: RunInputs) -> dict[str, Any]:
    """Return the identity of the critic's initial model as an option; empty where that is the base model."""
    return {} if facts.config.critic.path is None else {_CRITIC: facts.critic_identity}
