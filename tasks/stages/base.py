"""The base model as an artifact: built or converted here, or the identity of a folder or hub snapshot."""

from __future__ import annotations

from pathlib import Path

from configs.fingerprint import canonical_json
from configs.registry import create, resolve
from models.policies import POLICIES
from tasks.inputs.weight_sources import PIPELINE
from tasks.specs.base import BaseSpec
from tasks.stages.stage import Output, Shard, Stage

IDENTITY = "identity.json"


class BaseStage(Stage):
    """Builds the quickstart's model, converts single files, or records which model the run starts from."""

    # transformers' save_pretrained() leaves weights out on every rank but the first.
    first_rank_only = True

    identity: BaseSpec

    @property
    def on_ranks(self) -> bool:
        """True for a model that is made here."""
        return self.identity.section.build is not None or bool(self.identity.section.single_files)

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("model")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Build and pre-train, convert, or write the identity down."""
        self.host.use_threads()
        build = self.identity.section.build
        if self.identity.section.single_files:
            self._convert(folder / PIPELINE)
            return Output(rows=1)
        if build is None:
            (folder / IDENTITY).write_text(canonical_json(self.identity.options()))
            return Output(rows=1)
        from models.library_loading import quiet_libraries
        from models.quickstart import BUILDERS

        quiet_libraries()
        builder = create(BUILDERS, build.name, build.options, label="model.build")
        builder.build(folder / PIPELINE, self._report)
        return Output(rows=1)

    def _convert(self, target: Path) -> None:
        from models.library_loading import quiet_libraries

        quiet_libraries()
        section = self.identity.section
        family = resolve(POLICIES, section.policy, label="model.policy")
        self._report("single file", 0, 1)
        source = self.context.source_folder(section, self.identity.slot)
        family.write_single_files(section.single_files, source, target)
        self._report("single file", 1, 1)

    def _report(self, item: str, done: int, total: int) -> None:
        self.context.reporter.progress(self.name, 0, done, total, item)
