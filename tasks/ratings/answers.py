"""The answers of raters: records of a run that are only ever added, and the artifact of their preferences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from pydantic import Field

from flowmill.configs.errors import StoreError
from flowmill.configs.escaping import command, quoted
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.roots import root_option
from flowmill.storage import layout
from flowmill.storage.artifacts.checksummed_json import seal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import PREFERENCES, RATINGS, RunFolder
from flowmill.storage.artifacts.mirrored_records import number_of
from flowmill.storage.artifacts.records import Artifact, Record
from flowmill.storage.backends.process_tags import tag
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories import schema
from flowmill.storage.trajectories.tables import write_rows
from flowmill.tasks.metrics.samples import shards_of
from flowmill.tasks.ratings.request import STARS, RaterName, Task

_STAGE, _VERSION, _SHARD = "rate", 1, "all"
Key = tuple[tuple[str, str], ...]
"""(artifact, sample id) of each sample of a pair or group, sorted: the pair whatever its order."""


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
    second_artifact: Artifact
    second_sample: str
    preferred: Annotated[float, Field(ge=0, le=1)] | None
    """1: the first is better, 0: the second, 0.5: neither; None: skipped."""
    rater: RaterName
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Time that the answer took."""
    withdraws: int = 0
    """Number of the earlier answer, equal to this record, that it withdraws; 0: it is an answer."""
    task: Task = "compare"
    question: str = ""
    """The question; empty: the usual one of the task."""
    others: tuple[tuple[Artifact, str], ...] = ()
    """Artifact and id of the third sample of a group and of further ones, in the order of the page."""
    values: tuple[int, ...] = ()
    """Stars or ranks, of which 1 is the best, of all samples of a group; empty if it was skipped."""
    both_bad: bool = False
    """Whether neither is better as both are bad."""
    note: Annotated[str, Field(max_length=500)] = ""

    @property
    def samples(self) -> Key:
        """All samples, in the order of the page."""
        return ((self.first_artifact, self.first_sample), (self.second_artifact, self.second_sample), *self.others)

    @property
    def key(self) -> Key:
        """The pair or group."""
        return tuple(sorted(self.samples))

    @property
    def subject(self) -> tuple[str, str, Task, Key]:
        """Rater, question, task and samples, of which one answer counts."""
        return self.rater, self.question, self.task, self.key

    @property
    def skipped(self) -> bool:
        """Whether the rater gave no opinion."""
        return self.preferred is None and not self.values

    def comparisons(self) -> list[RatingAnswer]:
        """Return the answer as comparisons, of each two samples of a group; none if it was skipped."""
        if not self.values:
            return [] if self.skipped else [self]
        sign = 1 if self.task == "stars" else -1
        return [
            replace(
                self,
                first_artifact=one[0],
                first_sample=one[1],
                second_artifact=other[0],
                second_sample=other[1],
                others=(),
                values=(value, another),
                preferred=0.5 if value == another else float(sign * value > sign * another),
            )
            for (one, value), (other, another) in combinations(zip(self.samples, self.values, strict=True), 2)
        ]

    def place(self, where: str) -> str:
        """Return the path of the answer in the run of a path, with the number of that path."""
        return layout.run_series(where.split("/")[1], RATINGS, number_of(where))


def answers_of(run: RunFolder, question: str | None = None) -> dict[int, RatingAnswer]:
    """Return the answers of a run by number, in order, skipped pairs included and withdrawn answers left out.

    Of several answers of one rater to the same pair the last one counts, which was acknowledged last: a server that
    was killed may leave one that another server then completes. Withdrawing it withdraws all of them.

    Args:
        question: the question whose answers are returned; None: answers to all questions.
    """
    records = {number_of(path): _decoded(data, path) for path, data in run.series(RATINGS).items()}
    latest: dict[tuple[str, str, Task, Key], tuple[int, RatingAnswer]] = {}
    for number, record in records.items():
        latest.pop(record.subject, None)
        if not record.withdraws and question in (None, record.question):
            latest[record.subject] = (number, record)
    return dict(latest.values())


@lru_cache(maxsize=1 << 16)
def _decoded(data: bytes, path: str) -> RatingAnswer:
    # Every request of the page reads all answers, and they do not change.
    return RatingAnswer.decode(data, path)


def append_answer(run: RunFolder, answer: RatingAnswer) -> None:
    """Store an answer durably: it is synced to disk before this returns."""
    check_answer(run, answer)
    if answer.subject in (each.subject for each in answers_of(run, answer.question).values()):
        raise StoreError(
            f"'{answer.rater}' has answered this pair already. An answer is changed by undoing it and answering again."
        )
    _store(run, answer)


def check_answer(run: RunFolder, answer: RatingAnswer) -> None:
    """Check that an answer is one to its task, of samples of its prompt."""
    RatingAnswer.parse(seal(asdict(answer)), f"The answer of '{answer.rater}'")
    for artifact, sample in answer.key:
        if _prompts(run.store, ArtifactRef.parse(artifact)).get(sample) != answer.prompt_id:
            raise StoreError(f"{artifact} has no sample '{sample}' of prompt '{answer.prompt_id}'.")
    if len(set(answer.key)) < len(answer.key):
        raise StoreError(f"Sample '{answer.first_sample}' cannot be compared with itself.")
    _check_values(answer)


def _check_values(answer: RatingAnswer) -> None:
    most = STARS if answer.task == "stars" else len(answer.samples)
    numbers = answer.preferred is None and len(answer.values) == len(answer.samples)
    fits = not (answer.values or answer.others) if answer.task == "compare" else answer.skipped or numbers
    if not fits or not all(1 <= value <= most for value in answer.values):
        raise StoreError(
            f"The answer is for another question: '{answer.task}' of {len(answer.samples)} samples has "
            f"{'a preference' if answer.task == 'compare' else f'a number from 1 to {most} for each'}. It is not "
            "stored. Give the command the options that it was asked with, and load a page that was open again."
        )


def withdraw_answer(run: RunFolder, number: int) -> None:
    """Store that an answer does not count any more."""
    answer = answers_of(run).get(number)
    if answer is None:
        raise StoreError(f"Run '{run.name}' has no answer {number} that could be undone.")
    _store(run, replace(answer, withdraws=number))


def check_writable(run: RunFolder) -> None:
    """Check that answers can be stored, before a rater gives one."""
    try:
        root, trial = run.store.root, f"{layout.run(run.name)}/.{tag()}"
        root.create(trial, b"")
        # Keys that may not remove can store answers.
        with contextlib.suppress(StoreError, OSError):
            root.remove(trial)
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


def commit_preferences(run: RunFolder, question: str = "") -> ArtifactRef:
    """Make the answers to a question an artifact of kind ``preferences``; equal answers are the same artifact."""
    rows = _rows(answers_of(run, question))
    if not rows["number"]:
        raise StoreError(no_answers(run, question))
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


def no_answers(run: RunFolder, question: str) -> str:
    """Return the message that a run has no answers to a question."""
    others = sorted({each.question for each in answers_of(run).values()} - {question})
    named = ", ".join(f"--question {quoted(each)}" if each else "the usual one" for each in others)
    elsewhere = f" It has answers to other questions: {named}." if others else ""
    to = f" to the question {quoted(question)}" if question else ""
    how = command("flowmill", "rate", run.name, *root_option(run.store.root.uri))
    return f"Run '{run.name}' has no answers of raters{to} yet. '{how}' asks for them.{elsewhere}"


def comparisons_of(answers: Iterable[RatingAnswer]) -> list[RatingAnswer]:
    """Return answers as comparisons of two samples each, without skipped ones."""
    return [comparison for answer in answers for comparison in answer.comparisons()]


def _rows(answers: Mapping[int, RatingAnswer]) -> dict[str, list[Any]]:
    rows = [{**asdict(each), "number": number} for number, answer in answers.items() for each in answer.comparisons()]
    return {name: [row[name] for row in rows] for name in schema.PREFERENCES.names}


@lru_cache(maxsize=8)
def _prompts(store: ArtifactStore, ref: ArtifactRef) -> dict[str, str]:
    table = pa.concat_tables([shard.table.select(["sample_id", "prompt_id"]) for shard in shards_of(store, ref)])
    return dict(zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True))
