"""Judgments of people, read from files and from preferences in a store, with the media that they judge."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from flowmill.configs.errors import ConfigError, DataError, listed
from flowmill.configs.reward_fit import JudgmentRows
from flowmill.models.image_files import open_picture, size_of
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.inputs.components import open_trajectory_store
from flowmill.tasks.inputs.data_file import DataFile
from flowmill.tasks.inputs.data_rows import read_data_rows, rows_of
from flowmill.tasks.inputs.prompt_rows import too_large
from flowmill.tasks.inputs.shapes import recognized

if TYPE_CHECKING:
    from flowmill.models.rewards.backbones import Judged

#: Kind of artifacts with judgments.
_KIND = "preferences"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """One judgment."""

    prompt: str
    """The prompt; may be empty."""
    items: tuple[str, ...]
    """Digests of the two media that were compared, or of the one that was rated."""
    value: float
    """1: the first is preferred, 0: the second, 0.5: a tie; or a rating."""
    rater: str
    """Name of the rater; empty if unknown."""
    source: str
    """Name of the file or folder, or artifact."""
    where: str
    """File or artifact, and row, for messages."""


@dataclass(slots=True)
class Judgments:
    """Judgments and their media."""

    rows: list[Judgment] = field(default_factory=list)
    """All judgments: preferences, or ratings."""
    media: dict[str, Any] = field(default_factory=dict)
    """(H, W, 3) uint8 images, float32 latents or texts, by digest."""
    inputs: set[ArtifactRef] = field(default_factory=set)
    """Artifacts that they come from."""
    equal: int = 0
    """Rows of artifacts whose two media are equal, which are left out: raters were shown them."""
    problems: list[str] = field(default_factory=list)
    """Rows that cannot be used."""

    @property
    def rated(self) -> bool:
        """Whether they are ratings."""
        return len(self.rows[0].items) == 1

    def hold(self, content: Any) -> str:
        """Keep an image, latents or a text; return its digest."""
        if isinstance(content, str):
            data = content.encode()
        else:
            data = f"{content.shape}{content.dtype}".encode() + np.ascontiguousarray(content).tobytes()
        digest = xxhash.xxh3_128_hexdigest(data)
        self.media.setdefault(digest, content)
        return digest

    def add(self, row: Mapping[str, Any], items: Sequence[str | None], value: float, source: str, where: str) -> None:
        """Add a judgment with the prompt and rater of a row, or note a problem; an item is None if its is noted."""
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            self.problems.append(f"{where}: the prompt is {prompt!r}, not a text")
        elif len(items) == 2 and None not in items and items[0] == items[1]:
            self.problems.append(f"{where}: both sides are equal, so neither can be preferred")
        elif None not in items:
            names, rater = tuple(map(str, items)), str(row.get("rater") or "")
            fields = {"prompt": prompt, "rater": rater, "source": source, "where": where}
            self.rows.append(Judgment(items=names, value=value, **fields))


def read_judgments(
    sources: Sequence[str], judged: Judged, *, scale: tuple[float, float], store: ArtifactStore
) -> Judgments:
    """Return the judgments of files and artifacts, in order.

    Args:
        sources: sources of rows, or ``preferences/ID``.
        judged: media that they judge.
        scale: lowest and highest rating.
    """
    judgments = Judgments()
    for source in sources:
        if source.startswith(f"{_KIND}/") and not Path(source).exists():
            _read_artifact(judgments, source, judged, store)
        else:
            _read_rows(judgments, source, judged, scale)
    if len({len(row.items) for row in judgments.rows}) > 1:
        raise ConfigError("data: some rows are preferences and others are ratings. Fit one reward on each.")
    if judgments.problems:
        raise ConfigError(f"{listed(judgments.problems)}\nCorrect or remove them.")
    return judgments


def _read_rows(judgments: Judgments, source: str, judged: Judged, scale: tuple[float, float]) -> None:
    if judged == "latents":
        raise ConfigError(f"data: '{source}' has rows, but latents are only in a store. Name preferences/ID of one.")
    try:
        data = read_data_rows(_section(source, judged, scale), texts=judged == "texts")
    except DataError as error:
        raise ConfigError(f"data: {_own(str(error))}") from None
    judgments.problems += [_own(reason) for _, reason in data.refused]
    contents: dict[str, str | None] = {}
    for row in data.rows:
        for sample in row.samples:
            if sample.key not in contents:
                contents[sample.key] = _content(judgments, sample, judged)
        items, (value, *_) = [contents[sample.key] for sample in row.samples], row.ratings
        assert value is not None
        judgments.add({"prompt": row.text, **row.metadata}, items, value, Path(source).name, _own(row.place))


def _section(source: str, judged: Judged, scale: tuple[float, float]) -> JudgmentRows:
    """Return the section of a source: its columns are those of the shape of its first row that has one."""
    section = {"train": source, "scale": scale}
    rated = {"sample": judged.removesuffix("s"), "rating": "rating"}
    rows = (row for _, row in islice(rows_of(JudgmentRows.model_validate(section | rated)), 100))
    # A row whose text is empty has no shape.
    shapes = (
        recognized(row, {}, texts=judged == "texts", rated=True, pictured=False)
        for row in rows
        if isinstance(row, Mapping)
    )
    shape = next(filter(None, shapes), None)
    return JudgmentRows.model_validate(section | (rated if shape is None else {"columns": shape[1]}))


def _own(message: str) -> str:
    """Return a message about the rows of a run as one on those of a fit."""
    return message.removeprefix(f"{JudgmentRows.setting}: ")


def _content(judgments: Judgments, sample: DataFile, judged: Judged) -> str | None:
    try:
        if judged == "texts":
            if sample.text is None or sample.is_chat:
                raise ValueError("it is no text")
            return judgments.hold(sample.text)
        data = sample.read()
        if large := too_large(*size_of(io.BytesIO(data))):
            raise ValueError(f"it {large}. Scale it down")
        return judgments.hold(open_picture(io.BytesIO(data)))
    except DataError as error:
        judgments.problems.append(_own(str(error)))
    except (OSError, ValueError) as error:
        judgments.problems.append(f"{_own(sample.name)} cannot be read: {error}")
    return None


def _read_artifact(judgments: Judgments, source: str, judged: Judged, store: ArtifactStore) -> None:
    try:
        ref = ArtifactRef.parse(source)
        store.require(ref)
        rows = read_rows(store, ref).to_pylist()
        pairs = [(row[f"{side}_artifact"], row[f"{side}_sample"]) for row in rows for side in ("first", "second")]
        samples = {name: ArtifactRef.parse(name) for name in dict.fromkeys(name for name, _ in pairs)}
    except ValueError as error:
        raise ConfigError(f"data: '{source}': {error}.") from None
    judgments.inputs |= {ref, *samples.values()}
    media = {
        (name, sample): judgments.hold(content)
        for name, artifact in samples.items()
        for sample, content in _samples(store, artifact, {sample for other, sample in pairs if other == name}, judged)
    }
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        keys = [(row[f"{side}_artifact"], row[f"{side}_sample"]) for side in ("first", "second")]
        lost = next((f"{name} has no sample '{sample}'" for name, sample in keys if (name, sample) not in media), None)
        wrong = lost or (None if row["preferred"] in (0, 0.5, 1) else f"preferred is {row['preferred']}, not 0, 0.5, 1")
        if wrong:
            judgments.problems.append(f"{where}: {wrong}")
            continue
        items = [media[key] for key in keys]
        if items[0] == items[1]:
            judgments.equal += 1
        else:
            judgments.add(row, items, row["preferred"], source, where)


def _samples(store: ArtifactStore, ref: ArtifactRef, selected: set[str], judged: Judged) -> Iterator[tuple[str, Any]]:
    store.require(ref)
    for record in store.shards(ref):
        # By the files: a manifest in a store may name code.
        names = {file.name for file in record.files}
        form = "webdataset" if any(name.endswith(".tar") for name in names) else "parquet"
        shard = open_trajectory_store(form).open(store.files(ref, record))
        for row, sample in enumerate(shard.table.column("sample_id").to_pylist()):
            if sample in selected:
                content: Any = shard.final_latents(row) if judged == "latents" else shard.text(row)
                if judged == "images" and content is None:
                    content = shard.media(row)
                if isinstance(content, str) != (judged == "texts") or (judged == "images" and content.ndim != 3):
                    raise ConfigError(f"data: sample '{sample}' of {ref} is none of {judged}. Take another backbone.")
                yield sample, content
