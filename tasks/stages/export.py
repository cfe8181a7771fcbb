"""Writes the trained policy as files that other libraries load, with a card that says how to call them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowmill.tasks.inputs.base_model import describe_base, license_identity
from flowmill.tasks.inputs.prompts import prompt_set
from flowmill.tasks.inputs.rows.row import dataset_id
from flowmill.tasks.modalities.modality import ExportRequest
from flowmill.tasks.specs.graph import Node, policy_after
from flowmill.tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from flowmill.models.policies.parts import Part


class ExportStage(Stage):
    """The model after an epoch, below ``pipeline``."""

    # As for base models: a stand-in of a text encoder would have no weights.
    first_rank_only = True
    only = "model"

    def options(self) -> Mapping[str, Any]:
        """The format, arguments of the model, and the facts of the card."""
        config = self.config
        return {
            "format": self.format,
            "average": config.optimize.ema is not None,
            "epoch": self.epoch,
            **self.plan.modality_spec.export_options(self.plan),
            "seed": config.evaluate.seed,
            "samples": config.evaluate.samples,
            "algorithm": config.optimize.algorithm.name,
            "prompts": [prompt_set(config.prompts, "train"), prompt_set(config.prompts, "heldout")],
            "rewards": [[section.name, section.slot, section.weight] for section in config.rewards],
            "judges": [section.slot for section in config.evaluate.judges],
            **({"data": dataset} if config.data and (dataset := dataset_id(config.data.train)) else {}),
            **self._folder_options(),
        }

    def upstream(self) -> tuple[Node, ...]:
        """The policy after the epoch, base model, prompts, and the evaluations before training and after that ran."""
        evaluations = [node for epoch in dict.fromkeys((0, self.epoch)) for node in self._evaluation(epoch)]
        return (policy_after(self.epoch), Node(0, "base"), Node(0, "preprocess"), *evaluations)

    @property
    def format(self) -> str:
        """The written weights: adapters or the whole model."""
        return "lora" if self.config.model.lora else "full"

    def _evaluation(self, epoch: int) -> tuple[Node, ...]:
        """Return the stages of an epoch's evaluation that have run, whatever the settings; none if it has none.

        One that has run with other settings is an input too: it is due again before figures are written.
        """
        return tuple(node for node in self.plan.evaluation(epoch) if self.facts.run.entries_of(*node))

    def _folder_options(self) -> Mapping[str, Any]:
        """Return the names and license of a local base model for the card; as recorded where the folder is gone."""
        section, names = self.config.model, ("base", "license")
        if section.path is None:
            return {}
        if section.single_files:
            return {"base": section.base_name}
        folder = Path(section.path)
        if not self.facts.reads and folder.is_dir():
            base = describe_base(section, self.facts.model_identity, folder)
            return dict(zip(names, (base.name, license_identity(folder)), strict=True))
        entries = self.facts.run.entries_of(self.epoch, self.name)
        manifest = self.facts.store.manifest(entries[-1].ref) if entries else None
        return {} if manifest is None else {name: manifest.options[name] for name in names if name in manifest.options}

    @property
    def parts(self) -> frozenset[Part]:
        return self.modality.exporting_parts

    def run(self, shard: Shard, folder: Path) -> Output:
        exporting = ExportRequest(
            context=self.context, host=self.host, epoch=self.epoch, format=self.format, inputs=self.inputs()[:3]
        )
        self.modality.export(exporting, folder)
        return Output(rows=1)
