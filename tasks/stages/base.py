"""The base model as an artifact: built or converted here, or the identity of a folder or hub snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowmill.configs.fingerprint import canonical_json
from flowmill.configs.model import ModelSection
from flowmill.configs.registry import create
from flowmill.tasks.inputs.renderer import render_of
from flowmill.tasks.inputs.weight_sources import PIPELINE
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Output, Shard, Stage

IDENTITY = "identity.json"
#: Raised when builders write other files for equal options. 3: CLIP's tokenizer is the same every time.
_BUILDERS = 3


class BaseStage(Stage):
    """Builds the quickstart's model, converts single files, or records which model the run starts from.

    The slot tells the model that renders texts from the one that is trained.
    """

    # transformers' save_pretrained() leaves weights out on every rank but the first.
    first_rank_only = True
    only = "model"

    def options(self) -> Mapping[str, Any]:
        """The builder and its options, or the content of the model."""
        section = self.section
        if section.path is not None:
            files = {"single_file": self.facts.single_file_identity(section, self.slot)} if section.single_files else {}
            return {"identity": self.facts.renderer_identity if self.slot else self.facts.model_identity, **files}
        build = None if section.build is None else section.build.model_dump(mode="json")
        return {"build": build, "builders": _BUILDERS}

    def upstream(self) -> tuple[Node, ...]:
        return ()

    @property
    def section(self) -> ModelSection:
        """The model's section of the config."""
        return render_of(self.config).model if self.slot else self.config.model

    @property
    def on_ranks(self) -> bool:
        return self.section.build is not None or bool(self.section.single_files)

    def run(self, shard: Shard, folder: Path) -> Output:
        self.host.use_threads()
        build = self.section.build
        if self.section.single_files:
            self._convert(folder / PIPELINE)
            return Output(rows=1)
        if build is None:
            (folder / IDENTITY).write_text(canonical_json(self.options()))
            return Output(rows=1)
        from flowmill.models.library_loading import quiet_transformers
        from flowmill.models.quickstart import BUILDERS

        quiet_transformers()
        builder = create(BUILDERS, build.name, build.options, label="model.build")
        builder.build(folder / PIPELINE, self._report)
        return Output(rows=1)

    def _convert(self, target: Path) -> None:
        from flowmill.models.library_loading import quiet_libraries

        quiet_libraries()
        section = self.section
        family = (self.plan.drawer if self.slot else self.plan).family
        self.context.reporter.progress(self.name, 0, 0, 1, "single file")
        source = self.context.source_folder(section, self.slot)
        family.write_single_files(section.single_files, source, target)
        self.context.reporter.progress(self.name, 0, 1, 1, "single file")

    def _report(self, item: str, done: int, total: int) -> None:
        self.context.reporter.progress(self.name, 0, done, total, item)
