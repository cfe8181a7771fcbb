"""Renders a language model's texts with a frozen image model; rewards score the images."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flowmill.models.policies.parts import Part
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.tasks.inputs.components import decode_rows, media_format, open_trajectory_store
from flowmill.tasks.inputs.renderer import image_name, render_of, turn_in
from flowmill.tasks.metrics.samples import places_of, stored_sample
from flowmill.tasks.modalities.modality import SampleGeneration
from flowmill.tasks.specs.graph import RENDERER, Node
from flowmill.tasks.specs.turns import split_turn, turn_nodes, turns_of
from flowmill.tasks.stages.stage import Output, Shard, Stage


class DrawingStage(Stage):
    """Images of stored texts, shard by shard; each is stored with its text, and with the prompt that was rewritten.

    An empty text is drawn as an empty prompt is, and counted; of one that is too long for the image model it reads as
    much as of any prompt. Images of samples that have ended in an earlier turn are copied.
    """

    separable = True
    parts = frozenset({Part.RENDERER})

    def options(self) -> Mapping[str, Any]:
        """The images of each text, how they are drawn, and the noise."""
        section, drawer, turns = render_of(self.config), self.plan.drawer, turns_of(self.config)
        quantize = drawer.config.model.quantize
        return {
            "images": section.images,
            **({} if section.answer is None else {"answer": list(section.answer)}),
            "same_noise": section.same_noise,
            "store": self.config.rollout.store,
            **drawer.modality_spec.evaluation_options(drawer),
            **({} if turns is None else {"turn": self.turn, "done": turns.done}),
            **({} if quantize is None else {"quantize": quantize.fingerprinted()}),
            **self.draws(),
        }

    @abstractmethod
    def draws(self) -> Mapping[str, int]:
        """Return the seed of the noise."""

    @property
    def sizes(self) -> Mapping[str, int | None]:
        drawer = self.plan.drawer.config
        return {"render_rows": drawer.execution.rollout_batch_size, "decode_batch_size": decode_rows(drawer)}

    def shards(self) -> list[Shard]:
        return [Shard(name) for name, _, _ in self.context.store.require(self.inputs()[0]).shards]

    def run(self, shard: Shard, folder: Path) -> Output:
        from flowmill.tasks.stages.shard_writer import ShardWriter

        self.host.use_threads()
        renderer = self.host.renderer
        assert renderer is not None
        requested, drawer = list(self._requested(self.opened(self.inputs()[0], shard.name))), renderer.config
        due = [(sample, text) for sample, text in requested if text is not None]
        started = drawer.prompts.image is not None
        size, form = drawer.execution.rollout_batch_size, media_format(drawer)
        recent = self.context.recent.begin(self.ref, shard.name, exact=form.lossless)
        store = open_trajectory_store(self.config.rollout.store)
        with ShardWriter(store.writer(folder, form), recent) as writer:

            def drawn() -> Iterator[np.ndarray]:
                for start in range(0, len(due), size):
                    samples, texts = zip(*due[start : start + size], strict=True)
                    notes = [sample.metadata for sample in samples]
                    images = self.context.references(notes) if started else [[]] * len(samples)
                    yield from self._drawer.draw(renderer, texts, [sample.seed for sample in samples], images)
                    self.context.reporter.progress(self.name, self.epoch, start + len(texts), len(due), shard.name)

            media = drawn()
            for start in range(0, len(requested), size):
                some = requested[start : start + size]
                writer.add([sample if text is None else replace(sample, media=next(media)) for sample, text in some])
            figures, contents = {"empty": sum(not text for _, text in due)}, writer.contents
            return Output(rows=writer.rows, summary=figures, written=writer.end(), content=lambda: str(contents))

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        return {
            "images": sum(record.rows for record in records),
            "empty": sum(record.summary["empty"] for record in records),
        }

    def after_turn(self, name: str, *, evaluation: bool) -> tuple[Node, ...]:
        """Return the stages that a turn's images depend on; ``name`` is that of an additional evaluation."""
        texts = Node(self.epoch, "evaluate" if evaluation else "rollout", self.slot)
        if self.turn == 1:
            return (texts, Node(0, "base", RENDERER))
        before = turn_nodes(self.config, self.epoch, self.turn - 1, name, evaluation=evaluation)
        return (texts, Node(0, "base", RENDERER), before.images)

    @abstractmethod
    def seed(self, prompt_id: str, replica: int, image: int) -> int:
        """Return the seed of the initial noise of a text's image."""

    @cached_property
    def _drawer(self) -> SampleGeneration:
        modality: SampleGeneration = self.plan.drawer.modality
        return modality

    def _requested(self, opened: TrajectoryShard) -> Iterator[tuple[Sample, str | None]]:
        """Yield every image of every text, not drawn yet, with the text; with None images that remain from earlier."""
        section, model, turns = render_of(self.config), str(self.inputs()[1]), turns_of(self.config)
        for row, written in zip(opened.table.to_pylist(), self.modality.texts(opened), strict=True):
            text, metadata = section.drawn(written), json.loads(row["metadata"])
            ends = self.turn > 1 and turns is not None and turns.ends(written)
            remains = turn_in(metadata) < self.turn or (ends and not text)
            for image in range(section.images):
                name = image_name(row["sample_id"], image, of=section.images)
                if remains:
                    yield stored_sample(*self._earlier[name]), None
                    continue
                number = (self.turn - 1) * section.images + image
                yield (
                    Sample(
                        sample_id=name,
                        prompt_id=row["prompt_id"],
                        group_id=row["group_id"],
                        prompt=row["prompt"],
                        metadata=metadata,
                        epoch=row["epoch"],
                        replica=row["replica"],
                        seed=self.seed(row["prompt_id"], row["replica"], number),
                        policy=model,
                        sigmas=(),
                        text=np.frombuffer(text.encode(), np.uint8),
                    ),
                    text,
                )
        for shard, _ in self._earlier.values() if self.turn > 1 else ():
            shard.close()

    @cached_property
    def _earlier(self) -> dict[str, tuple[TrajectoryShard, int]]:
        return places_of(self.context.store, self.inputs()[2], None)


class RenderStage(DrawingStage):
    """Images of an epoch's texts."""

    def draws(self) -> Mapping[str, int]:
        return {"seed": self.config.run.seed, "epoch": self.epoch}

    def upstream(self) -> tuple[Node, ...]:
        """The texts, the image model, the images of the turn before."""
        return self.after_turn("", evaluation=False)

    def seed(self, prompt_id: str, replica: int, image: int) -> int:
        """Of the run and the epoch; with ``render.same_noise`` one for all texts of a prompt."""
        from flowmill.tasks.runs.seeds import derive

        own = 0 if render_of(self.config).same_noise else replica
        return derive(self.config.run.seed, "render", self.epoch, prompt_id, own, image)


class DepictStage(DrawingStage):
    """Images of an evaluation's texts, from fixed noise; the slot names an evaluation that is not the run's own."""

    def draws(self) -> Mapping[str, int]:
        return {"seed": self.config.evaluate.seed}

    def upstream(self) -> tuple[Node, ...]:
        """The texts, the image model, the images of the turn before."""
        return self.after_turn(split_turn(self.slot)[0], evaluation=True)

    def seed(self, prompt_id: str, replica: int, image: int) -> int:
        """Of the evaluation: the same for every policy."""
        from flowmill.tasks.runs.seeds import derive

        return derive(self.config.evaluate.seed, "depict", prompt_id, replica, image)
