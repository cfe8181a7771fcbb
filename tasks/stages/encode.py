"""Prompts in, embeddings out. Each distinct prompt is encoded once ever per encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from flowmill.configs.fingerprint import fingerprint
from flowmill.models.policies.parts import Part
from flowmill.storage.trajectories.embeddings import EmbeddingCache, EmbeddingWriter, Rows
from flowmill.tasks.inputs.prompts import Prompt
from flowmill.tasks.runs.sharding import encoding_cuts
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Output, Shard, Stage


class EncodeStage(Stage):
    """Encodes the prompts that are not in the cache yet; text encoders are loaded only if there are any."""

    parts = frozenset({Part.TEXT})
    separable = True

    def options(self) -> Mapping[str, Any]:
        return self.plan.modality_spec.encoding_options(self.plan)

    def upstream(self) -> tuple[Node, ...]:
        return (Node(0, "base"),)

    def shards(self) -> list[Shard]:
        """Ranges of all distinct prompts with so many missing ones each, named by the content of these."""
        missing = self._missing
        ends = encoding_cuts(len(missing))
        parts = [missing[start:stop] for start, stop in pairwise((0, *ends))]
        names = [fingerprint([condition for _, condition in part])[:16] for part in parts]
        return [Shard(name, part[0][0], part[-1][0] + 1) for name, part in zip(names, parts, strict=True)]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Encode missing prompts of one range, in batches of one fixed size: rows do not depend on their neighbors."""
        self.host.use_threads()
        conditions = self._cache.missing(list(islice(self._prompts, shard.start, shard.stop)))
        size, prompts = self.config.execution.encode_batch_size, self._prompts
        for note in self.modality.cut_notes(self.host, [prompts[condition] for condition in conditions]):
            self.context.reporter.message(f"{self.name}: {note}")
        with EmbeddingWriter(folder, conditions) as writer:
            for start in range(0, len(conditions), size):
                writer.add(self._encode([prompts[condition] for condition in conditions[start : start + size]]))
                self.context.reporter.progress(self.name, 0, min(start + size, len(conditions)), len(conditions))
        return Output(rows=len(conditions))

    @property
    def _cache(self) -> EmbeddingCache:
        return self.context.embedding_cache(self.ref)

    @cached_property
    def _prompts(self) -> dict[str, Prompt]:
        """Prompts to encode, by their key; none for a kind that needs no encoding."""
        splits = self.context.source_prompts.values() if self.modality.encodes else ()
        return {prompt.condition: prompt for split in splits for prompt in split}

    @cached_property
    def _missing(self) -> list[tuple[int, str]]:
        """Prompts to encode, with their position among all: ranges do not depend on later commits."""
        missing = set(self._cache.missing(list(self._prompts)))
        return [(place, condition) for place, condition in enumerate(self._prompts) if condition in missing]

    def _encode(self, prompts: Sequence[Prompt]) -> Rows:
        """Return the rows of some prompts; the batch is filled up to its size with the last of them."""
        import torch

        from flowmill.models.policies.nan_checks import finite

        padded = [*prompts, *[prompts[-1]] * (self.config.execution.encode_batch_size - len(prompts))]
        encoded = self.modality.encode(self.host, padded)
        for name, rows in encoded.items():
            finite(rows[: len(prompts)], f"embeddings '{name}'")
        tensors = {name: rows[: len(prompts)].cpu().contiguous() for name, rows in encoded.items()}
        # NumPy has no bfloat16: its bits are stored, half the size of a wider float, and exact.
        bits = {name: "bfloat16" for name, rows in tensors.items() if rows.dtype == torch.bfloat16}
        return Rows({k: (v.view(torch.uint16) if k in bits else v).numpy() for k, v in tensors.items()}, bits)
