"""Writes the trained policy as files that plain diffusers loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from tasks.chain import Node, policy_after
from tasks.sources import PIPELINE, Weights
from tasks.stage import Output, Shard, Stage


class ExportStage(Stage):
    """A LoRA file for ``load_lora_weights``, or a full pipeline folder for ``from_pretrained``."""

    name = "export"
    kind = "exports"

    def options(self) -> Mapping[str, Any]:
        """The format."""
        return {"format": self._format, "average": self.config.optimize.ema is not None}

    def upstream(self) -> tuple[Node, ...]:
        """The policy after the epoch."""
        return (policy_after(self.epoch),)

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("model")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Write the files."""
        trainable = self.workspace.trainable(self.inputs()[0], Weights.AVERAGE)
        target = folder / PIPELINE
        if self._format == "lora":
            trainable.policy.save_lora(target)
            return Output(rows=1)
        shutil.copytree(self.workspace.base_folder, target, ignore=self._ignore(trainable.policy.denoisers))
        for name, module in trainable.policy.denoisers.items():
            module.save_pretrained(target / name)
            # diffusers writes the path it loaded from into the config; the base's own has none.
            shutil.copy(self.workspace.base_folder / name / "config.json", target / name / "config.json")
        return Output(rows=1)

    @property
    def _format(self) -> str:
        chosen, trained = self.config.export.format, "lora" if self.config.model.lora else "full"
        if chosen != "auto" and chosen != trained:
            raise ConfigError(
                f"export.format is '{chosen}', but this run trains {trained} weights. Set it to 'auto' or '{trained}'."
            )
        return trained

    def _ignore(self, denoisers: Mapping[str, Any]) -> Any:
        base = self.workspace.base_folder

        def ignore(folder: str, names: list[str]) -> list[str]:
            return [name for name in names if name in denoisers] if Path(folder) == base else []

        return ignore


def exported_folder(stage: ExportStage) -> Path:
    """Return the folder of a finished export."""
    store = stage.workspace.store
    store.require(stage.ref)
    return store.folder(stage.ref, store.shards(stage.ref)[0]) / PIPELINE
