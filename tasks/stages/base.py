"""The base model as an artifact: built and pre-trained here, or the identity of a folder or hub snapshot."""

from __future__ import annotations

from pathlib import Path

from configs.fingerprint import canonical_json
from configs.registry import create
from tasks.identities.base import BaseIdentity
from tasks.inputs.sources import PIPELINE
from tasks.stages.stage import Output, Shard, Stage

IDENTITY = "identity.json"


class BaseStage(Stage):
    """Builds the quickstart's model, or records which model the run starts from."""

    # transformers' save_pretrained() leaves weights out on every rank but the first.
    first_rank_only = True

    identity: BaseIdentity

    @property
    def on_ranks(self) -> bool:
        """True for a model that is trained here."""
        return self.identity.section.build is not None

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("model")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Build and pre-train, or write the identity down."""
        self.host.use_threads()
        build = self.identity.section.build
        if build is None:
            (folder / IDENTITY).write_text(canonical_json(self.identity.options()))
            return Output(rows=1)
        from models.libraries import quiet_libraries
        from models.quickstart import BUILDERS

        quiet_libraries()
        builder = create(BUILDERS, build.name, build.options, what="model.build")
        builder.build(folder / PIPELINE, self._report)
        return Output(rows=1)

    def _report(self, what: str, done: int, total: int) -> None:
        self.context.reporter.progress(self.name, 0, done, total, what)
