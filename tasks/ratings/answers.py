"""The answers of raters: records of a run that are only ever added, and the artifact of their preferences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from pydantic import Field

from flowmill.configs.errors import StoreError
from flowmill.configs.escaping import command
from flowmill.configs.fingerprint import fingerprint
from flowmill.storage import layout
from flowmill.storage.artifacts.checksummed_json import seal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import PREFERENCES, RATINGS, RunFolder
from flowmill.storage.artifacts.mirrored_records import number_of
from flowmill.storage.artifacts.records import Artifact, Record
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories import schema
from flowmill.storage.trajectories.tables import write_rows
from flowmill.tasks.metrics.samples import shards_of
from flowmill.tasks.ratings.request import RaterName

_STAGE, _VERSION, _SHARD = "rate", 1, "all"
Key = tuple[tuple[str, str], tuple[str, str]]
"""(artifact, sample id) of both samples of a pair, sorted: the pair whatever its order."""


def as_key(one: tuple[str, str], other: tuple[str, str]) -> Key:
    """Return the pair of two samples, each (artifact, sample id)."""
    return (one, other) if one <= other else (other, one)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingAnswer(Record):
    """One answer of a rater, or the withdrawal of one."""

    noun = "an answer of a rater"

    prompt_id: str
    """Identity of the prompt of both samples."""
    prompt: str
    """Its text."""
    first_artifact: Artifact
    """Artifact of the first sample, which the page showed left."""
    first_sample: str
    """Its id."""
    second_artifact: Artifact
    """Artifact of the second sample."""
    second_sample: str
    """Its id."""
    preferred: Annotated[float, Field(ge=0, le=1)] | None
    """1: the first is better, 0: the second, 0.5: neither; None: skipped."""
    rater: RaterName
    """The rater."""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Time that the answer took."""
    withdraws: int = 0
    """Number of the earlier answer, equal to this record, that it withdraws; 0: it is an answer."""

    @property
    def key(self) -> Key:
        """The pair."""
        return as_key((self.first_artifact, self.first_sample), (self.second_artifact, self.second_sample))

    def place(self, where: str) -> str:
        """Return the path of the answer in the run of a path, with the number of that path."""
        return layout.run_series(where.split("/")[1], RATINGS, number_of(where))


def answers_of(run: RunFolder) -> dict[int, RatingAnswer]:
    """Return the answers of a run by number, in order, skipped pairs included and withdrawn answers left out.

    If two processes stored answers of one rater to the same pair, the first one counts.
    """
    records = {number_of(path): _decoded(data, path) for path, data in run.series(RATINGS).items()}
    withdrawn = {record.withdraws for record in records.values()}
    latest: dict[tuple[str, Key], tuple[int, RatingAnswer]] = {}
    for number, record in records.items():
        if not record.withdraws and number not in withdrawn:
            latest.setdefault((record.rater, record.key), (number, record))
    return dict(latest.values())


@lru_cache(maxsize=1 << 16)
def _decoded(data: bytes, path: str) -> RatingAnswer:
    # Every request of the page reads all answers, and they do not change.
    return RatingAnswer.decode(data, path)


def append_answer(run: RunFolder, answer: RatingAnswer) -> None:
    """Store an answer durably: it is synced to disk before this returns."""
    answer = RatingAnswer.parse(seal(asdict(answer)), f"The answer of '{answer.rater}'")
    for artifact, sample in answer.key:
        if _prompts(run.store, ArtifactRef.parse(artifact)).get(sample) != answer.prompt_id:
            raise StoreError(f"{artifact} has no sample '{sample}' of prompt '{answer.prompt_id}'.")
    if len(set(answer.key)) < 2:
        raise StoreError(f"Sample '{answer.first_sample}' cannot be compared with itself.")
    if any(each.rater == answer.rater and each.key == answer.key for each in answers_of(run).values()):
        raise StoreError(
            f"'{answer.rater}' has answered this pair already. An answer is changed by undoing it and answering again."
        )
    _store(run, answer)


def withdraw_answer(run: RunFolder, number: int) -> None:
    """Store that an answer does not count any more."""
    answer = answers_of(run).get(number)
    if answer is None:
        raise StoreError(f"Run '{run.name}' has no answer {number} that could be undone.")
    _store(run, replace(answer, withdraws=number))


def check_writable(run: RunFolder) -> None:
    """Check that answers can be stored, before a rater gives one."""
    try:
        with run.store.root.staging():
            pass
    except (StoreError, OSError) as error:
        raise StoreError(
            f"The store '{run.store.root.uri}' is not writable, so no answer of raters to run '{run.name}' could be "
            "stored. Make it writable, or copy it and name the copy with --root."
        ) from error


def _store(run: RunFolder, answer: RatingAnswer) -> None:
    try:
        run.add(RATINGS, asdict(answer))
    except (StoreError, OSError) as error:
        # Raters read this message, and cannot change the store.
        raise StoreError(
            "The store cannot be written to, so this is not stored. Say so to the person who serves this page."
        ) from error


def commit_preferences(run: RunFolder) -> ArtifactRef:
    """Make the answers of a run an artifact of kind ``preferences``; equal answers are the same artifact."""
    rows = _rows(answers_of(run))
    if not rows["number"]:
        raise StoreError(no_answers(run))
    inputs = sorted({*rows["first_artifact"], *rows["second_artifact"]})
    options = {"answers": fingerprint(rows)}
    work: dict[str, Any] = {"stage": _STAGE, "version": _VERSION, "options": options, "inputs": inputs}
    ref = ArtifactRef(PREFERENCES, fingerprint(work))

    def write(folder: Path) -> tuple[int, dict[str, Any]]:
        write_rows(PREFERENCES, folder, rows)
        return len(rows["number"]), {"raters": sorted(set(rows["rater"]))}

    run.store.make(ref, _SHARD, write, stage=_STAGE, stage_version=_VERSION, options=options, inputs=tuple(inputs))
    run.add(PREFERENCES, {"artifact": str(ref)})
    return ref


def no_answers(run: RunFolder) -> str:
    """Return the message that a run has no answers."""
    return f"Run '{run.name}' has no answers of raters yet. '{command('flowmill', 'rate', run.name)}' asks for them."


def _rows(answers: Mapping[int, RatingAnswer]) -> dict[str, list[Any]]:
    """Return the columns of the table of preferences, without skipped pairs."""
    rows = [{**asdict(answer), "number": number} for number, answer in answers.items() if answer.preferred is not None]
    return {name: [row[name] for row in rows] for name in schema.PREFERENCES.names}


@lru_cache(maxsize=8)
def _prompts(store: ArtifactStore, ref: ArtifactRef) -> dict[str, str]:
    """Return the prompt id of each sample of an artifact."""
    table = pa.concat_tables([shard.table.select(["sample_id", "prompt_id"]) for shard in shards_of(store, ref)])
    return dict(zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True))
