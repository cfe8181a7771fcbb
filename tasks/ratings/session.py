"""The groups of samples that raters see, and the number of raters that answered each."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from flowmill.configs.errors import ConfigError, StoreError
from flowmill.configs.escaping import quoted, visible
from flowmill.configs.fingerprint import fingerprint
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.trajectories.media import DEFAULT_MEDIA
from flowmill.tasks.ratings.answers import RatingAnswer, answers_of, append_answer, comparisons_of, withdraw_answer
from flowmill.tasks.ratings.figures import disputed, rating_report
from flowmill.tasks.ratings.groups import RatedGroup, SampleSource, groups_of, next_group, order_of
from flowmill.tasks.ratings.request import STARS, RateRequest, RaterName

_PREFERRED = {"left": 1.0, "right": 0.0, "tie": 0.5, "bad": 0.5}
_QUESTIONS = {
    "compare": "Which one is better?",
    "stars": "How good is each one?",
    "rank": "Which one is best? Give each a rank.",
}
#: Seconds for which a group that a rater sees counts as answered, for the number of raters per group.
_PENDING_S = 600.0
#: Most disputed pairs in a view.
_DISPUTED = 50


class RaterBody(BaseModel):
    """The rater of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rater: RaterName


class AnswerBody(RaterBody):
    """One answer."""

    group: str
    """The pair or group, as ``/api/group`` named it."""
    choice: Literal["left", "right", "tie", "bad", "skip"] | None = None
    """The answer to a pair; skip also answers a group."""
    values: Annotated[tuple[int, ...], Field(max_length=6)] = ()
    """Stars or ranks in the order of the page."""
    note: Annotated[str, StringConstraints(max_length=500, strip_whitespace=True)] = ""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Time that it took."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.choice is None) == (not self.values):
            raise ValueError("an answer has either a choice or values")
        return self


class RatingSession:
    """The groups of a rating, and the answers of its run."""

    def __init__(
        self, run: RunFolder, sources: Sequence[SampleSource], request: RateRequest, guidelines: str = ""
    ) -> None:
        self._run, self._request, self._sources = run, request, sources
        groups = groups_of(sources, request.seed, 2 if request.task == "compare" else request.group)
        self._groups = {self._name([each.draw, request.task, request.question]): each for each in groups}
        self._keys = {each.key for each in groups}
        self._samples = {
            (source.artifact, row["sample_id"]): (source, row) for source in sources for row in source.rows
        }
        self._named = {self._name(sample): sample for sample in self._samples}
        self._guidelines = guidelines if request.guidelines is None else _text_of(request.guidelines)
        self._lock = threading.Lock()
        self._shown: dict[str, tuple[RatedGroup, float]] = {}

    def question(self) -> dict[str, Any]:
        """Return the task of raters, without samples."""
        request = self._request
        return {
            "task": request.task,
            "question": visible(request.question) or _QUESTIONS[request.task],
            "guidelines": visible(self._guidelines, keep="\n\t"),
            "stars": STARS,
            "media": any(row["media_format"] for source in self._sources for row in source.rows[:1]),
        }

    def state(self, rater: str) -> dict[str, Any]:
        """Return the next group of a rater, None after the last, and how far the rater is."""
        with self._lock:
            answers = self._answers()
            own = [each for each in answers.values() if each.rater == rater]
            answered, full = {each.key for each in own}, self._full(rater, answers)
            left = [each for each in self._groups.values() if each.key in answered or each.key not in full]
            total = min(len(left), self._request.pairs or len(left))
            group = next_group(left, answered) if len(answered) < total else None
            self._shown.pop(rater, None)
            if group is not None:
                self._shown[rater] = group, time.monotonic()
        shown = None if group is None else self._showing(group, rater)
        skipped = sum(each.skipped for each in own)
        return {"rater": rater, "done": len(answered), "skipped": skipped, "total": total, "group": shown}

    def answer(self, body: AnswerBody) -> None:
        """Store an answer durably."""
        answer = self.parsed(body, body.rater)
        with self._lock:
            append_answer(self._run, answer)

    def parsed(self, body: AnswerBody, shown_to: str) -> RatingAnswer:
        """Return an answer to a group in the order that someone saw, which is not checked yet."""
        group = self._groups.get(body.group)
        if group is None:
            raise StoreError(
                "The answer is for another question or other samples than this command asks about, and is not stored. "
                "Give the command the options that the question was asked with, and load a page that was open again."
            )
        first, second, *others = order_of(group, shown_to)
        return RatingAnswer(
            prompt_id=group.prompt_id,
            prompt=group.prompt,
            first_artifact=first[0],
            first_sample=first[1],
            second_artifact=second[0],
            second_sample=second[1],
            others=tuple(others),
            preferred=_PREFERRED.get(body.choice or ""),
            values=body.values,
            rater=body.rater,
            seconds=round(body.seconds, 3),
            task=self._request.task,
            question=self._request.question,
            both_bad=body.choice == "bad",
            note=body.note,
        )

    def tasks(self) -> list[dict[str, Any]]:
        """Return the groups as tasks of other programs: prompt, samples, images and clips as data URLs, and name."""
        return [self._task(name, group) for name, group in self._groups.items()]

    def undo(self, rater: str) -> None:
        """Withdraw the last answer of a rater."""
        with self._lock:
            answers = [number for number, each in self._answers().items() if each.rater == rater]
            if not answers:
                raise HTTPException(409, f"'{rater}' has no answer that could be undone. Answer a pair first.")
            withdraw_answer(self._run, max(answers))

    def media(self, name: str, start: int | None) -> tuple[str, bytes]:
        """Return the media type and bytes of a sample, or of an image that its prompt starts from."""
        if name not in self._named:
            raise HTTPException(404, "This server shows no such sample.")
        source, row = self._samples[self._named[name]]
        if start is None:
            return source.media(row)
        starts = source.starts(row["sample_id"])
        if start >= len(starts):
            raise HTTPException(404, f"The prompt of this sample starts from {len(starts)} images.")
        return "image/png", DEFAULT_MEDIA.encode(starts[start])

    def overview(self) -> dict[str, Any]:
        """Return progress, figures and disputed pairs for the one who serves the page."""
        answers = answers_of(self._run, self._request.question).values()
        counts = Counter(each.key for each in self._answers().values() if not each.skipped)
        progress = Counter(counts[group.key] for group in self._groups.values())
        wanted = self._request.overlap
        split = [rows for rows in disputed(comparisons_of(answers)) if all(key in self._samples for key in rows[0].key)]
        return {
            **self.question(),
            "run": self._run.name,
            "progress": [
                {"raters": raters, "groups": groups, **({"complete": raters >= wanted} if wanted else {})}
                for raters, groups in sorted(progress.items())
            ],
            **(rating_report(self._sources[0].context, self._request.question) if answers else {}),
            "disputed": [_dispute(rows, self._content) for rows in split[:_DISPUTED]],
            "disputes": len(split),
            "notes": [
                {"rater": each.rater, "prompt": visible(each.prompt), "note": visible(each.note)}
                for each in answers
                if each.note
            ],
        }

    def _answers(self) -> dict[int, RatingAnswer]:
        """Return the answers to the groups of this server, by number."""
        answers = answers_of(self._run, self._request.question).items()
        return {number: each for number, each in answers if each.task == self._request.task and each.key in self._keys}

    def _full(self, rater: str, answers: Mapping[int, RatingAnswer]) -> set[Any]:
        """Return the groups that need no further rater: answered by others, or shown to them a short time ago.

        If nothing else is left for a rater, the group that was shown first is none of them: its rater may be gone.
        """
        overlap = self._request.overlap
        if overlap is None:
            return set()
        since, own = time.monotonic() - _PENDING_S, {each.key for each in answers.values() if each.rater == rater}
        counts = Counter(each.key for each in answers.values() if each.rater != rater and not each.skipped)
        shown = [(at, group.key) for other, (group, at) in self._shown.items() if other != rater and at > since]
        waiting = [(at, key) for at, key in shown if counts[key] < overlap and key not in own]
        counts.update(key for _, key in shown)
        full = {key for key, count in counts.items() if count >= overlap}
        return full - {min(waiting)[1]} if waiting and self._keys <= full | own else full

    def _task(self, name: str, group: RatedGroup) -> dict[str, Any]:
        task: dict[str, Any] = {"group": name, "prompt": group.prompt}
        for number, (source, row) in enumerate(map(self._samples.__getitem__, order_of(group, ""))):
            if not row["media_format"]:
                task[f"response_{number}"] = row["text"]
                continue
            kind, data = source.media(row)
            task[f"{'video' if kind.startswith('video') else 'image'}_{number}"] = (
                f"data:{kind};base64,{b64encode(data).decode()}"
            )
        return task

    def _showing(self, group: RatedGroup, rater: str) -> dict[str, Any]:
        order = order_of(group, rater)
        source, row = self._samples[order[0]]
        starts = len(source.starts(row["sample_id"]))
        return {
            "name": self._name([group.draw, self._request.task, self._request.question]),
            "prompt": visible(group.prompt, keep="\n\t"),
            "starts": [f"api/media/{self._name(order[0])}?start={number}" for number in range(starts)],
            "samples": [self._content(sample) for sample in order],
        }

    def _content(self, sample: tuple[str, str]) -> dict[str, Any]:
        row: Mapping[str, Any] = self._samples[sample][1]
        text = row.get("text")
        drawn = f"api/media/{self._name(sample)}" if row["media_format"] else None
        return {"text": None if text is None else visible(text, keep="\n\t"), "media": drawn}

    def _name(self, value: Any) -> str:
        return fingerprint([self._request.seed, value])


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--guidelines: {quoted(file)} cannot be read: {error}. Name a text file in UTF-8.") from None


def _dispute(rows: Sequence[RatingAnswer], content: Any) -> dict[str, Any]:
    first, other = rows[0].key
    votes = []
    for each in rows:
        winner = first if (each.preferred == 1) == (each.samples[0] == first) else other
        vote = "neither" if each.preferred == 0.5 else "first" if winner == first else "second"
        votes.append({"rater": each.rater, "vote": vote, "note": visible(each.note)})
    return {"prompt": visible(rows[0].prompt, keep="\n\t"), "samples": [content(first), content(other)], "votes": votes}
