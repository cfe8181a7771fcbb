"""The embedding cache: each distinct prompt is encoded once ever per encoder.

``embeddings/<encoder>/`` grows by shards: one safetensors file of stacked tensors plus the keys of its rows. There is
no manifest; a reader sees the committed shards. A key is a hash of the prompt text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from configs.errors import CorruptError, NotCommittedError
from configs.fingerprint import fingerprint
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.records import ShardRecord

TENSORS = "embeddings.safetensors"
KEYS = "keys.json"


def embedding_key(text: str) -> str:
    """Return the cache key of a prompt text."""
    return fingerprint(text)


class EmbeddingCache:
    """Rows of named tensors by prompt text."""

    def __init__(self, store: ArtifactStore, ref: ArtifactRef) -> None:
        """Bind to the cache of one encoder."""
        self.store = store
        self.ref = ref
        self._where: dict[str, tuple[ShardRecord, int]] = {}
        self._seen: set[str] = set()

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Return the distinct texts that are not cached, in order of first appearance."""
        self._refresh()
        return [text for text in dict.fromkeys(texts) if embedding_key(text) not in self._where]

    def write(self, folder: Path, texts: Sequence[str], tensors: Mapping[str, np.ndarray]) -> None:
        """Write one shard's files: row i of every (N, ...) tensor belongs to texts[i]."""
        arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(arrays, folder / TENSORS)
        (folder / KEYS).write_text(json.dumps([embedding_key(text) for text in texts]))

    def load(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return (len(texts), ...) arrays in the order of the texts.

        Raises:
            NotCommittedError: a text has not been encoded.
            CorruptError: a shard is damaged or holds other tensors than its neighbors.
        """
        absent = self.missing(texts)
        if absent:
            raise NotCommittedError(
                f"{len(absent)} prompts have no embedding in {self.ref}, the first is {absent[0]!r}. "
                "Run 'flowmill stage preprocess' first."
            )
        rows: dict[str, Mapping[str, np.ndarray]] = {}
        wanted = {embedding_key(text): None for text in texts}
        for record in {self._where[key][0].shard: self._where[key][0] for key in wanted}.values():
            shard = self._open(record)
            for key in wanted:
                if self._where[key][0].shard == record.shard:
                    rows[key] = {name: tensor[self._where[key][1]] for name, tensor in shard.items()}
        ordered = [rows[embedding_key(text)] for text in texts]
        return {name: np.stack([row[name] for row in ordered]) for name in ordered[0]}

    def digest(self, texts: Sequence[str]) -> str:
        """Return one hash over the embeddings of these texts, however they are spread over shards."""
        arrays = self.load(sorted(set(texts)))
        parts = [[name, str(array.dtype), fingerprint(array.tobytes().hex())] for name, array in sorted(arrays.items())]
        return fingerprint(parts)

    def _open(self, record: ShardRecord) -> dict[str, np.ndarray]:
        folder = self.store.folder(self.ref, record)
        try:
            with safe_open(folder / TENSORS, framework="numpy") as file:
                return {name: file.get_tensor(name) for name in sorted(file.keys())}
        except (OSError, ValueError) as error:
            raise CorruptError(f"{folder / TENSORS} cannot be read: {error}") from None

    def _refresh(self) -> None:
        for record in self.store.records(self.ref):
            if record.shard in self._seen:
                continue
            keys = json.loads((self.store.folder(self.ref, record) / KEYS).read_text())
            self._where.update({key: (record, row) for row, key in enumerate(keys)})
            self._seen.add(record.shard)
