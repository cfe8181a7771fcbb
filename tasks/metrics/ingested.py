"""The ingested samples of a run as figures for people, read from the artifact of its ingest stage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowmill.configs.data import DataSection
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.rows.row import dataset_id
from flowmill.tasks.metrics.samples import artifact_table

#: File of a shard with the rows that were left out: place and reason of each.
REFUSED = "refused.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestedFigures:
    """The ingested samples of a run, without folders of this machine."""

    source: str
    """Name of the file or folder, or id of the dataset."""
    dataset: str | None
    """Id of the dataset of the hub; None for a file or folder."""
    kind: str
    """Kind of the rows: pairs, rated samples or samples."""
    rows: int
    """Rows that were used."""
    samples: int
    """Samples of these rows."""
    prompts: int
    """Distinct prompts of these rows."""
    size: int
    """Stored bytes."""
    refused: Sequence[tuple[str, str]]
    """Place and reason of each row that was left out."""
    licenses: Mapping[str, int]
    """Samples by the license that their row states; empty text: none."""

    def __str__(self) -> str:
        return f"{self.rows} {self.kind} of {self.source}{self._left_out}"

    @property
    def published(self) -> str:
        """The same without the name of a file or folder: equal rows may have several, and are one artifact."""
        named = f" of {self.dataset}" if self.dataset else ""
        return f"{self.rows} {self.kind}{named}{self._left_out}"

    @property
    def _left_out(self) -> str:
        return f", {len(self.refused)} rows left out" if self.refused else ""

    @property
    def license_text(self) -> str:
        """The licenses that rows state, with numbers of samples."""
        return "licenses: " + ", ".join(f"{name or 'none stated'} {count}" for name, count in self.licenses.items())


def ingested_figures(store: ArtifactStore, ref: ArtifactRef, section: DataSection) -> IngestedFigures:
    """Return the figures of the ingested samples.

    Args:
        ref: the artifact of the ingest stage.
        section: the run's section of data.
    """
    manifest, table = store.require(ref), artifact_table(store, ref).select(["sample_id", "prompt", "metadata"])
    refused: list[tuple[str, str]] = []
    for record in store.shards(ref):
        refused += json.loads((store.folder(ref, record) / REFUSED).read_text())
    source, dataset = Path(section.train), dataset_id(section.train)
    below = f"{source if source.is_dir() else source.parent}/"
    stated = Counter(license_of(text) for text in table.column("metadata").to_pylist())
    samples = int(manifest.summary["samples"])
    return IngestedFigures(
        source=dataset or source.name,
        dataset=dataset,
        kind="pairs" if section.paired else "rated samples" if section.rating is not None else "samples",
        # The names of a row's samples begin alike.
        rows=len({name.partition("-")[0] for name in table.column("sample_id").to_pylist()}),
        samples=samples,
        prompts=len(set(table.column("prompt").to_pylist())),
        size=manifest.size,
        refused=[(place.replace(below, ""), reason.replace(below, "")) for place, reason in refused],
        licenses=dict(sorted(stated.items())),
    )


def license_of(metadata: str) -> str:
    """Return the license that the stored metadata of a sample states, as 'license' or 'licence'; empty: none."""
    fields = json.loads(metadata)
    return str(fields.get("license") or fields.get("licence") or "")
