"""The run's prompts as an artifact, with the images they start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowmill.configs.fingerprint import canonical_json
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.trajectories.tables import write_rows
from flowmill.tasks.inputs.prompt_rows import image_data
from flowmill.tasks.inputs.prompts import Prompt, image_files
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Output, Shard, Stage


class PreprocessStage(Stage):
    """The prompt table of a run, with the content hash of every prompt's embedding."""

    only = "prompts"

    def options(self) -> Mapping[str, Any]:
        return {"prompts": self.facts.prompts_identity}

    def upstream(self) -> tuple[Node, ...]:
        return (Node(0, "encode"),)

    def run(self, shard: Shard, folder: Path) -> Output:
        from flowmill.storage.trajectories.source_images import write_references

        rows = [(split, prompt) for split, prompts in self._prompts.items() for prompt in prompts]
        columns = {
            "prompt_id": [prompt.id for _, prompt in rows],
            "split": [split for split, _ in rows],
            "prompt": [prompt.text for _, prompt in rows],
            "metadata": [canonical_json(dict(prompt.metadata)) for _, prompt in rows],
        }
        write_rows("prompts", folder, columns)
        images = image_files(prompt for _, prompt in rows)
        write_references(folder, list(images), lambda key: image_data(images[key], key))
        encoded = rows if self.modality.encodes else []
        digest = self.context.embeddings.digest([prompt.condition for _, prompt in encoded])
        (folder / "embeddings.json").write_text(canonical_json({"digest": digest}))
        return Output(rows=len(rows))

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        return {split: len(prompts) for split, prompts in self._prompts.items()}

    @property
    def _prompts(self) -> dict[str, Sequence[Prompt]]:
        return self.context.source_prompts
