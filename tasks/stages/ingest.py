"""Given samples as trajectories: checked, encoded once by the policy's own autoencoder or tokenizer, and stored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowmill.configs.errors import DataError, without_process
from flowmill.configs.fingerprint import canonical_json
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.tasks.inputs.components import decode_rows, media_format, open_trajectory_store
from flowmill.tasks.inputs.data_row import DataRow
from flowmill.tasks.inputs.data_rows import DataRows, stopped
from flowmill.tasks.inputs.data_section import data_of, data_rows_of
from flowmill.tasks.metrics.ingested import REFUSED
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.samplers import SamplingContext
from flowmill.tasks.runs.sharding import cover
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from flowmill.models.policies.parts import Part

#: Columns of the table of variants.
_VARIANTS = ("sample_id", "row", "view", "captions", "empty", "prior")
#: Seconds in which rows after an unusable one are read too.
_LOOK_S = 60.0


class IngestStage(Stage):
    """The samples of ``data.train``, with the ratings of those that have one; with a slot those of ``data.heldout``."""

    separable = True

    def options(self) -> Mapping[str, Any]:
        """The rows by content, and the size and form in which they are stored."""
        return {
            **self.facts.data_options(self.slot),
            "store": self.config.rollout.store,
            **self.plan.modality_spec.given_options(self.plan),
            **({"variants": self._variants} if self._variants else {}),
        }

    def upstream(self) -> tuple[Node, ...]:
        """The base model, whose autoencoder or tokenizer encodes the samples."""
        return (Node(0, "base"),)

    @property
    def parts(self) -> frozenset[Part]:
        return self.modality.given_parts

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """Of encoding, which takes batches of the size of decoding."""
        return {"decode_batch_size": decode_rows(self.config)}

    def load(self) -> None:
        """Load the encoder, if samples are encoded by a model."""
        if self.parts:
            self.host.decoding()

    def shards(self) -> list[Shard]:
        """Ranges of rows: those of committed shards, and the gaps between them."""
        total, size = len(self._data.rows), data_of(self.config).rows_per_shard
        committed = [_range(name) for name in self.context.store.committed(self.ref)]
        ends = (*range(size, total, size), total)
        return [Shard(f"{start:08d}-{stop:08d}", start, stop) for start, stop in cover(ends, committed)]

    def run(self, shard: Shard, folder: Path) -> Output:
        from flowmill.storage.trajectories.tables import write_rows
        from flowmill.tasks.stages.shard_writer import ShardWriter

        self.host.use_threads()
        making = SamplingContext(context=self.context, host=self.host, policy=self.inputs()[0], epoch=0)
        refused = list(self._data.refused) if shard.start == 0 else []
        rewards: dict[str, list[Any]] = {name: [] for name in ("sample_id", "prompt_id", "group_id", "reward", "note")}
        variants: dict[str, list[Any]] = {name: [] for name in _VARIANTS}
        form, size = media_format(self.config), decode_rows(self.config)
        store = open_trajectory_store(self.config.rollout.store)
        with ShardWriter(store.writer(folder, form), lambda media: None) as writer:
            waiting: list[tuple[DataSample, Any]] = []
            for number, row in enumerate(self._data.rows[shard.start : shard.stop], shard.start):
                read = self._read(making, number, row, refused)
                if refused and data_of(self.config).bad_rows == "stop":
                    raise self._stopped(making, number, refused)
                ids = ([prompt.id for prompt in row.prompts], row.empty_prompt.id) if self._variants else ([], "")
                for view, sample, _ in read:
                    rating = row.ratings[sample.replica]
                    _append(rewards, (sample.name, sample.prompt.id, sample.group, rating, row.place))
                    _append(variants, (sample.name, number, view, *ids, row.is_prior))
                waiting += [(sample, content) for _, sample, content in read]
                while len(waiting) >= size or (waiting and number + 1 == shard.stop):
                    part, waiting = waiting[:size], waiting[size:]
                    writer.add(self.modality.given(making, *map(list, zip(*part, strict=True))))
                self.context.reporter.progress(self.name, 0, number + 1, len(self._data.rows))
            contents = writer.contents
            written = writer.end()
        labels = {"artifact": str(self.ref), "reward_name": "given", "reward_options": "{}"}
        write_rows("rewards", folder, rewards, labels)
        if self._variants:
            write_rows("variants", folder, variants)
        stored = [(place, without_process(reason)) for place, reason in refused]
        (folder / REFUSED).write_text(canonical_json(stored))
        summary = {"rows": shard.stop - shard.start, "refused": len(refused)}
        return Output(rows=writer.rows, summary=summary, written=written, content=lambda: str(contents))

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        samples = sum(record.rows for record in records)
        if not samples:
            raise DataError(
                f"data.{self.slot or 'train'}: none of {len(self._data.rows)} rows could be used; the files {REFUSED} "
                f"of {self.ref} say why. Mend the samples."
            )
        names = ("rows", "refused")
        return {**{name: sum(record.summary[name] for record in records) for name in names}, "samples": samples}

    @property
    def _variants(self) -> Mapping[str, Any]:
        """How rows are encoded in several ways; held-out ones are not."""
        return {} if self.slot else data_of(self.config).variants

    @cached_property
    def _data(self) -> DataRows:
        return data_rows_of(self.config, heldout=bool(self.slot))

    def _read(
        self, making: SamplingContext, number: int, row: DataRow, refused: list[tuple[str, str]]
    ) -> list[tuple[int, DataSample, Any]]:
        """Return view, samples and their contents of a row, without equal views; none if it cannot be used."""
        read: list[tuple[int, DataSample, Any]] = []
        seen: list[list[Any]] = []
        try:
            for window, mirrored in self._views(number):
                samples = self._samples(number, row, len(seen), window=window, mirrored=mirrored)
                contents = [self.modality.read_given(making, sample) for sample in samples]
                if len(contents) == 2 and self.modality.same_given(*contents):
                    raise DataError(
                        f"{row.place}: chosen and rejected sample are equal, as the model sees them. Remove the row."
                    )
                # Crops of a sample of the model's shape are equal.
                if not any(all(map(self.modality.same_given, contents, each)) for each in seen):
                    read += [(len(seen), *each) for each in zip(samples, contents, strict=True)]
                    seen.append(contents)
        except DataError as error:
            refused.append((row.place, str(error)))
            return []
        return read

    def _samples(self, number: int, row: DataRow, view: int, **seen_as: Any) -> list[DataSample]:
        prompt = row.prompt
        group = f"d{number:08d}" if data_of(self.config).rating is None else row.rated_group
        return [
            DataSample(
                file=file,
                prompt=prompt,
                name=f"d{number:08d}-{prompt.id}-{replica}{f'-{view}' if view else ''}",
                group=group,
                first=row.samples[0],
                replica=replica,
                **seen_as,
            )
            for replica, file in enumerate(row.samples)
        ]

    def _views(self, number: int) -> list[tuple[tuple[float, float], bool]]:
        """Return the windows of a row, each as it is and mirrored if that is set; equal for runs of all seeds."""
        from flowmill.tasks.runs.seeds import drawn

        windows = [(0.5, 0.5)]
        if count := self._variants.get("windows", 0):
            windows = [tuple(drawn("window", number, place).random(2).tolist()) for place in range(count)]
        return [
            (window, each) for window in windows for each in ((False, True) if self._variants.get("flip") else (False,))
        ]

    def _stopped(self, making: SamplingContext, number: int, refused: list[tuple[str, str]]) -> DataError:
        """Return the error of a row that cannot be used and of the rows after it, as many as are read in a minute."""
        until = time.monotonic() + _LOOK_S
        for later, row in islice(enumerate(self._data.rows), number + 1, None):
            if time.monotonic() > until:
                return DataError(f"{stopped(refused)}\nThe rows from {row.place} on were not read yet.")
            self._read(making, later, row, refused)
        return stopped(refused)


def _append(columns: Mapping[str, list[Any]], row: Sequence[Any]) -> None:
    for name, value in zip(columns, row, strict=True):
        columns[name].append(value)


def _range(name: str) -> tuple[int, int]:
    start, _, stop = name.partition("-")
    return int(start), int(stop)
