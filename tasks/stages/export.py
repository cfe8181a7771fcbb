"""Writes the trained policy as files that other libraries load, with a card that says how to call them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.modalities.modality import ExportRequest
from tasks.specs.export import ExportSpec
from tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from models.policies.base import Part


class ExportStage(Stage):
    """The model after an epoch, below ``pipeline``."""

    identity: ExportSpec
    # As for base models: a stand-in of a text encoder would have no weights.
    first_rank_only = True

    @property
    def parts(self) -> frozenset[Part]:
        """Models of the export, and of its images."""
        return self.policy_kind.exporting_parts

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("model")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Write model, settings and card."""
        exporting = ExportRequest(
            context=self.context, host=self.host, identity=self.identity, inputs=self.inputs()[:3]
        )
        self.policy_kind.export(exporting, folder)
        return Output(rows=1)
