"""The rows of ``data.train`` and ``data.heldout``: prompts with samples, checked and named by content.

The identity of the data depends on no path, and nothing is decoded to compute it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowmill.configs.data import DataSection
from flowmill.configs.errors import LISTED, DataError, PromptError, listed
from flowmill.configs.fingerprint import canonical_json, hash_text
from flowmill.storage.backends.checksums import hash_data
from flowmill.storage.backends.file_hash_cache import file_hashes
from flowmill.tasks.inputs.chats import history_of
from flowmill.tasks.inputs.columns import shaped, used_columns
from flowmill.tasks.inputs.data_row import DataRow, prompt_of, read_row, restored_image, stored_image
from flowmill.tasks.inputs.data_spool import Spool
from flowmill.tasks.inputs.prompts import Prompt, Seen
from flowmill.tasks.inputs.rows.bounds import content_bytes
from flowmill.tasks.inputs.rows.read import Row, read_again, source_rows
from flowmill.tasks.inputs.rows.remote import is_remote
from flowmill.tasks.inputs.rows.row import Names, RowLocation

#: Rows stored together, and more of them up to so many files, which are hashed together: each time the cache of
#: hashes of a folder is read and written. Fewer if they have more bytes.
_ROWS, _FILES, _BYTES = 1 << 10, 1 << 14, 1 << 24
#: Unusable rows after which reading stops.
_MOST_REFUSED = 10_000
#: Place and reason of a row that cannot be used.
_Refusal = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DataRows:
    """All usable rows, and the others with reasons; both are read from disk on demand."""

    rows: Sequence[DataRow]
    """Usable rows, in order."""
    prompts: Sequence[Prompt]
    """Their distinct prompts, in order of first appearance."""
    refused: Sequence[tuple[str, str]]
    """Place and reason of each row that is left out."""
    identity: str
    """Identity of the data by content and order: the fingerprint of the list of identities of rows."""
    prior: int = 0
    """Rows of ``data.prior``, which are the last ones."""
    alone: bool = False
    """Whether a sample is no chat."""


def contents_of(row: DataRow) -> tuple[str | Seen, ...]:
    """Return the content of prompts and samples."""
    return (*row.seen_prompts, *(sample.key for sample in row.samples))


def read_data_rows(
    section: DataSection,
    heldout: frozenset[Seen] = frozenset(),
    apart: frozenset[str | Seen] = frozenset(),
    *,
    texts: bool = False,
) -> DataRows:
    """Return the rows of a section; see ``flowmill.tasks.inputs.data_section``.

    Args:
        section: names the rows.
        heldout: held-out prompts, as ``seen`` returns them, which no row may have.
        apart: prompts and samples of held-out rows, which no row may have either.
        texts: all samples are texts; otherwise a name that ends like an image or clip is the path of one.
    """
    reading = _Reading(section, apart)
    for each in filter(None, (section, section.rows_of_prior())):
        _read_source(reading, each, heldout, texts=texts)
    return reading.read()


def _read_source(reading: _Reading, section: DataSection, heldout: frozenset[Seen], *, texts: bool) -> None:
    rows, files, size = list[DataRow | _Refusal](), 0, 0
    for place, row in rows_of(section, texts=texts):
        try:
            if isinstance(row, DataError):
                raise row
            parts = [read_row(each, section, place, texts=texts) for each in shaped(row, section, place, texts=texts)]
            for part in parts:
                if heldout and not heldout.isdisjoint(part.seen_prompts):
                    raise DataError(
                        f"{part.place}: the prompt {part.text[:60]!r} is in prompts.heldout too, whose evaluation "
                        "would not be of held-out prompts. Remove it from one of the two."
                    )
        except (PromptError, DataError) as error:
            rows.append((str(place), str(error)))
            size += len(str(error))
        else:
            rows += parts
            for part in parts:
                files += sum(not sample.key for sample in part.samples)
                size += len(part.text) + sum(len(sample.text or "") for sample in part.samples)
                size += content_bytes([part.metadata, part.image]) if part.metadata or part.image else 0
        if max(files, len(rows)) >= _FILES or (len(rows) >= _ROWS and not files) or size >= _BYTES:
            reading.keep(rows)
            rows, files, size = [], 0, 0
    reading.keep(rows)


def rows_of(section: DataSection, *, texts: bool = False) -> Iterator[tuple[RowLocation, Row]]:
    """Yield location and columns of each row of a section; of tars the members that hold texts are read."""
    columns = {*used_columns(section.prompt), section.rating, section.messages, section.columns.get("preferred")}
    columns |= {section.sample} if texts else set()
    sample = section.chosen if section.paired else section.sample
    texts_of_tars = frozenset(filter(None, columns))
    names = Names(section.prompt, str(sample), not section.trained, texts_of_tars, section.repeats == "folders")
    return source_rows(section.train, section.split, section.setting, names)


def reasons_of(refused: Sequence[_Refusal]) -> str:
    """Return the first reasons why rows cannot be used."""
    return listed([reason for _, reason in refused[:LISTED]], len(refused))


def stopped(refused: Sequence[_Refusal]) -> DataError:
    """Return the error of rows that cannot be used and may not be left out."""
    between = " " if len(refused) == 1 else "\n"
    return DataError(f"{reasons_of(refused)}{between}Or set data.bad_rows to 'leave_out'.")


class _Reading:
    """Rows on their way to the disk, and their identity."""

    def __init__(self, section: DataSection, apart: frozenset[str | Seen]) -> None:
        self._section, self._apart, self._spool = section, apart, Spool()
        self._digest = hashlib.blake2b(b"[", digest_size=16)
        self.prior, self.alone = 0, False

    def keep(self, rows: list[DataRow | _Refusal]) -> None:
        for row in _keyed(rows):
            if not isinstance(row, DataRow):
                self._refuse(*row)
                continue
            try:
                if self._apart and not self._apart.isdisjoint(contents_of(row)):
                    raise DataError(
                        f"{row.place} has a prompt or sample of data.heldout, whose loss would not be that of held-out "
                        "rows. Remove it from one of the two."
                    )
                for part in _checked(row, self._spool):
                    self._digest.update(part)
                self.prior += row.repeats if row.is_prior else 0
                self.alone |= not all(sample.is_chat for sample in row.samples)
            except DataError as error:
                self._refuse(row.place, str(error))

    def read(self) -> DataRows:
        rows, refused = self._spool.items("rows", DataRow.restored), self._refused()
        source = f"{self._section.setting}: '{self._section.train}'"
        if not rows and not refused:
            raise DataError(f"{source} holds no row. Write some into it, or name another.")
        if not rows:
            raise DataError(f"{source} holds no usable row. {reasons_of(refused)}")
        if refused and self._section.bad_rows == "stop":
            raise stopped(refused)
        prompts = self._spool.items("prompts", lambda each: prompt_of(each[0], each[1], restored_image(each[2])))
        self._digest.update(b"]")
        return DataRows(rows, prompts, refused, self._digest.hexdigest(), self.prior, self.alone)

    def _refused(self) -> Sequence[_Refusal]:
        return self._spool.items("refused", lambda each: (each[0], each[1]))

    def _refuse(self, place: str, reason: str) -> None:
        count = self._spool.add("refused", json.dumps([place, reason]))
        if count >= _MOST_REFUSED and self._section.bad_rows == "stop":
            # A setting may be wrong for all rows of a large source.
            raise DataError(f"{reasons_of(self._refused())}\nReading stopped there. Mend these first.")


def _keyed(rows: list[DataRow | _Refusal]) -> Iterator[DataRow | _Refusal]:
    """Yield rows with the content keys of their files, which are hashed once, and from a cache if unchanged; files that
    cannot be read have none."""
    names: dict[str, dict[str, None]] = {}
    usable = (row for row in rows if isinstance(row, DataRow))
    for sample in (sample for row in usable for sample in row.samples if not sample.key):
        names.setdefault(sample.folder, {})[sample.path] = None
    keys = {folder: _hashes(folder, list(paths)) for folder, paths in names.items()}
    for row in rows:
        if isinstance(row, DataRow) and names and not all(sample.key for sample in row.samples):
            samples = (each if each.key else replace(each, key=keys[each.folder][each.path]) for each in row.samples)
            yield replace(row, samples=tuple(samples))
        else:
            yield row


def _hashes(folder: str, names: list[str]) -> dict[str, str]:
    try:
        if is_remote(folder):
            return {name: hash_data(read_again(f"{folder}/{name}", 0, None, ())) for name in names}
        return file_hashes(Path(folder), names)
    except OSError:
        if len(names) == 1:
            return {names[0]: ""}
    return {name: key for each in names for name, key in _hashes(folder, [each]).items()}


def _checked(row: DataRow, spool: Spool) -> list[bytes]:
    """Keep a row as often as it counts, and return its parts of the identity; refuse a pair of equal samples, and a
    row with the prompt and samples of an earlier one."""
    for sample in row.samples:
        if not sample.key:
            raise DataError(f"{sample.name} cannot be read. Make it readable, or remove the row.")
    if len(row.samples) == 2 and row.samples[0].key == row.samples[1].key:
        raise DataError(f"{row.place}: chosen and rejected sample are equal, so the pair says nothing. Remove the row.")
    try:
        prompt = canonical_json([row.text, dict(row.metadata)])
        prompt.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{row.place}: columns must be plain JSON values: {error}.") from None
    content = f"{prompt[:-1]},{canonical_json([sample.key for sample in row.samples])}"
    # Rows without images keep the identity that they had before prompts had some; so do those of one caption.
    image = "" if row.image is None else f",{canonical_json(row.image[1])}"
    if first := spool.seen(hash_text(f"{content}{image}]")):
        raise DataError(f"{row.place} repeats {first[2]}: the same prompt with the same sample. Remove one of the two.")
    files = stored_image(row.image)
    for text in row.captions or (row.text,):
        plain = canonical_json([text, dict(row.metadata)]) if row.captions else prompt
        if spool.seen(hash_text(f"{plain[:-1]}{image}]")) is None:
            spool.add("prompts", f"{plain[:-1]},{json.dumps(files)}]")
    samples = [sample.stored() for sample in row.samples]
    stored = json.dumps([row.place, samples, row.ratings, files, row.captions, row.is_prior])
    more = f",{canonical_json([row.captions, row.is_prior])}" if row.captions or row.is_prior else ""
    # Rated chats were compared by their first message alone.
    rated = len(row.ratings) == 1 and row.ratings[0] is not None
    history = history_of(row.samples[0]) if rated else ""
    identity = f"{content},{canonical_json(row.ratings)}{image}{more}{history and f',{history}'}]"
    counts = [spool.add("rows", f"{prompt[:-1]},{stored[1:]}") for _ in range(row.repeats)]
    return [f"{',' if count > 1 else ''}{identity}".encode() for count in counts]
