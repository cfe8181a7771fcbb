"""The inputs of a run: store, config, lineage, and the identities of the models and prompts that the config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from flowmill.configs.errors import ConfigError, NotCommittedError
from flowmill.configs.model import ModelSection
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.configs.user_directories import possible_path
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.inputs.data_section import data_of, data_rows_of, sources_of
from flowmill.tasks.inputs.policy_kind import writes_texts
from flowmill.tasks.inputs.prompts import Prompt
from flowmill.tasks.inputs.renderer import render_of
from flowmill.tasks.inputs.rows.files import is_there
from flowmill.tasks.inputs.source_prompts import prompts_fingerprint
from flowmill.tasks.inputs.weight_sources import (
    adapter_identity,
    components_in_files,
    critic_folder,
    model_identity,
    single_file_identity,
    source_folder,
)
from flowmill.tasks.specs.graph import RENDERER
from flowmill.tasks.specs.input_hashes import InputContents, contents_error
from flowmill.tasks.specs.plan import RunPlan

#: Key of the critic's initial model in options of stages, where that is not the base model.
_CRITIC = "critic_base"
#: Key of the texts around given ones, in options of ``ingest``.
_AROUND = "around_answers"


class RunInputs:
    """Store, config and run, with the identities of inputs outside the store."""

    def __init__(self, store: ArtifactStore, config: RunConfig, run: RunFolder, *, reads: bool = False) -> None:
        """Bind store, config and run.

        Args:
            config: the run's config, or another that one stage is run with.
            reads: nothing is computed: identities of base model and prompts are as recorded in the run.
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
    def adapter_identity(self) -> dict[str, str]:
        """Identity of the adapters that training starts from; as recorded if their file is gone."""
        lora = self.config.model.lora
        assert lora is not None
        path = Path(str(lora.start))
        recorded = self.recorded("start", 0, "policy") if self.reads or not possible_path(path).exists() else None
        return recorded or adapter_identity(path)

    @cached_property
    def start(self) -> Mapping[str, Any]:
        """The policy of another run that this one starts from, see ``flowmill.tasks.runs.start``; as recorded at its
        begin."""
        record = self.run.describe() or {}
        return record.get("start") or self.recorded("start", 0, "policy") or self.find_start()

    @property
    def starts_from(self) -> dict[str, str] | None:
        """The run and the policy that the run starts from, as RUN@EPOCH and ``kind/id``."""
        section = self.config.model
        return None if section.start is None else {"run": section.start, "policy": self.start["policy"]}

    def find_start(self) -> Mapping[str, Any]:
        """Return the policy to start from, of a run without a record of it."""
        raise NotCommittedError(f"Run '{self.run.name}' has lost its first record. Start it again with its config.")

    def recorded(self, option: str, epoch: int, stage: str, slot: str = "") -> Any:
        """Return an option of a stage's newest artifact that has it; None if there is none."""
        return self._recorded_with(option, epoch, stage, slot).get(option)

    def _recorded_with(self, option: str, epoch: int, stage: str, slot: str = "") -> Mapping[str, Any]:
        """Return all options of the same artifact; empty if there is none."""
        manifests = (self.store.manifest(entry.ref) for entry in reversed(self.run.entries_of(epoch, stage, slot)))
        return next((each.options for each in manifests if each is not None and option in each.options), {})

    @cached_property
    def renderer_identity(self) -> dict[str, Any]:
        """Identity of the model that renders texts."""
        return self._identity_of(render_of(self.config).model, RENDERER)

    @cached_property
    def critic_identity(self) -> dict[str, Any]:
        """Identity of the critic's initial model, if it is not the base model; as recorded if its folder is gone."""
        path = self.config.critic.path
        assert path is not None
        local = not self.reads and possible_path(path).is_dir()
        recorded = None if local else self.recorded(_CRITIC, 1, "value")
        return recorded or model_identity(str(critic_folder(path)), None)

    def _identity_of(self, section: ModelSection, slot: str) -> dict[str, Any]:
        assert section.path is not None
        local = Path(section.path).is_dir()
        for entry in [] if local else reversed(self.run.entries_of(0, "base", slot)):
            manifest = self.store.manifest(entry.ref)
            identity = {} if manifest is None else manifest.options.get("identity", {})
            if self.reads or identity.get("hub") == section.path:
                return dict(identity)
        return model_identity(section.path, section.revision, without=components_in_files(section))

    @property
    def identities(self) -> dict[str, Any]:
        """Identities of the fits, the files and the models in local folders that the config names, as plain data."""
        config = self.config
        paths = {"model_identity": config.model.path, "critic_identity": config.critic.path}
        paths["renderer_identity"] = None if config.render is None else config.render.model.path
        models = {name: getattr(self, name) for name, path in paths.items() if path and Path(path).is_dir()}
        return {"fits": self.contents.fits.resolved(config), "files": self.contents.by_setting, "models": models}

    def adopt(self, identities: Mapping[str, Any]) -> None:
        """Use the ``identities`` of the run's own process, rather than look again."""
        self.contents.adopt(identities["fits"], identities["files"])
        vars(self).update(identities["models"])

    def check_model(self, section: ModelSection, slot: str) -> None:
        """Check that a local model that is about to be read is the one that the run was started with.

        Args:
            slot: of its base artifact.

        Raises:
            ConfigError: it has other files now, or on this machine.
        """
        if section.path is not None and not section.single_files and Path(section.path).is_dir():
            setting, seen = "render.model" if slot else "model", self.renderer_identity if slot else self.model_identity
            if _differ(model_identity(section.path, section.revision), seen):
                raise contents_error(f"{setting}.path: the folder '{section.path}'")

    def check_critic(self) -> None:
        """Check the same of the model that the critic starts from: its own, else the base model."""
        path = self.config.critic.path
        if path is None:
            self.check_model(self.config.model, "")
        elif _differ(model_identity(str(critic_folder(path)), None), self.critic_identity):
            raise contents_error(f"critic.path: the folder '{path}'")

    def single_file_identity(self, section: ModelSection, slot: str) -> dict[str, str]:
        """Return the identity of single files; as recorded if one is gone.

        Args:
            slot: the slot of that model.
        """
        there = all(possible_path(file).is_file() for file in section.single_files.values())
        recorded = self.recorded("single_file", 0, "base", slot) if self.reads or not there else None
        return recorded or single_file_identity(section)

    @property
    def source_prompts(self) -> dict[str, Sequence[Prompt]]:
        """The prompts the config names, by split."""
        return self.plan.prompts

    def data_identity(self, slot: str) -> str:
        """Return the identity of ingested samples, or with a slot of the held-out ones."""
        return str(self.data_options(slot)["data"])

    def data_options(self, slot: str) -> dict[str, Any]:
        """Return that identity, and ``around_answers`` if some of the texts get it; as recorded if the run is only
        read, or the source is gone."""
        section = data_of(self.config)
        sources = [str(section.heldout)] if slot else sources_of(section)
        gone = self.reads or not all(map(is_there, sources))
        if gone and (recorded := self._recorded_with("data", 0, "ingest", slot)):
            return {name: recorded[name] for name in ("data", _AROUND) if name in recorded}
        rows = data_rows_of(self.config, heldout=bool(slot))
        around = self.around_answers if rows.alone else ()
        return {"data": rows.identity, **({_AROUND: list(around)} if around else {})}

    @cached_property
    def around_answers(self) -> Sequence[str]:
        """The spaces that the model's chat template writes before and after an answer; empty for none, or where rows
        have no column of prompts. As recorded if the run is only read, or its model is not in a local folder."""
        section = self.config.model
        if not (writes_texts(self.config) and data_of(self.config).prompt and section.path):
            return ()
        away = not Path(section.path).is_dir() and self.recorded("identity", 0, "base") == self.model_identity
        recorded = self._recorded_with("data", 0, "ingest") if self.reads or away else {}
        if self.reads or recorded:
            return tuple(recorded.get(_AROUND, ()))
        folder = source_folder(section, self.model_identity.get("commit"))
        around: Sequence[str] = self.plan.modality.around_given(self.plan, folder)
        return around

    @cached_property
    def contents(self) -> InputContents:
        """Digests of the files and folders that options of components name."""
        return InputContents(self.store, self.run, self.config, self.metadata, reads=self.reads)

    def metadata(self) -> list[Mapping[str, Any]]:
        """Return the metadata of all prompts that the config names."""
        return [prompt.metadata for prompts in self.source_prompts.values() for prompt in prompts]

    @cached_property
    def prompts_identity(self) -> str:
        """Identity of the prompts."""
        record = (self.run.describe() or {}) if self.reads else {}
        recorded = record.get("preprocess")
        return str(recorded) if recorded is not None else prompts_fingerprint(self.source_prompts)

    def reward_section(self, slot: str, *, judges: bool = False) -> RewardSection:
        """Return the reward or monitor, or with ``judges`` the reward or judge, of a slot."""
        sections = [*self.config.rewards, *(self.config.evaluate.judges if judges else self.config.monitors)]
        for section in sections:
            if section.slot == slot:
                return section
        slots = ", ".join(section.slot for section in sections)
        raise ConfigError(f"rewards: there is no reward '{slot}' in this config; it has {slots}.")


def critic_identity(facts: RunInputs) -> dict[str, Any]:
    """Return the identity of the critic's initial model as an option; empty where that is the base model."""
    return {} if facts.config.critic.path is None else {_CRITIC: facts.critic_identity}


def _differ(now: Mapping[str, Any], seen: Mapping[str, Any]) -> bool:
    """Return whether two models differ; a snapshot of a hub and a copy of its files have other identities."""
    return now.keys() == seen.keys() and now != seen
