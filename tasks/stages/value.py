"""Values and reference log-probs of the samples of an epoch: one forward of each, no reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flowmill.models.policies.parts import Part
from flowmill.storage.artifacts.row_digest import Contents
from flowmill.storage.trajectories.tables import write_rows
from flowmill.tasks.modalities.modality import ValueRequest
from flowmill.tasks.specs.graph import Node, policy_after
from flowmill.tasks.specs.run_inputs import critic_identity
from flowmill.tasks.stages.stage import Output, Shard, Stage


class ValueStage(Stage):
    """A critic's value of every token, and the base model's log-probs.

    Kept apart from rollouts, so that another critic needs no new ones, and from rewards, so that another reward needs
    no new values.
    """

    def options(self) -> Mapping[str, Any]:
        """Which of the two there are, and how they are computed."""
        estimator = self.plan.estimator
        options: dict[str, Any] = {"reference": estimator.needs_reference}
        if estimator.needs_values:
            options["critic"] = self.config.critic.model_dump(mode="json", include={"backbone", "dtype"})
            options |= critic_identity(self.facts)
            options["seed"] = self.config.run.seed
        return {**options, **self.plan.modality_spec.value_options(self.plan)}

    def upstream(self) -> tuple[Node, ...]:
        """The policy that the epoch trains, with its critic, and the trajectories."""
        return (policy_after(self.epoch - 1), Node(self.epoch, "rollout"))

    @property
    def parts(self) -> frozenset[Part]:
        return self.modality.training_parts | {Part.CRITIC}

    @property
    def sizes(self) -> Mapping[str, int | None]:
        return {"micro_batch_size": self.config.execution.micro_batch_size}

    def shards(self) -> list[Shard]:
        return [Shard(name) for name, _, _ in self.context.store.require(self.inputs()[1]).shards]

    def load(self) -> None:
        """Policy and critic; ranks that hold their weights together make them whole."""
        self._valuing.load()

    def run(self, shard: Shard, folder: Path) -> Output:
        self.host.use_threads()
        opened = self.opened(self.inputs()[1], shard.name)
        self._valuing.load()
        values = self.modality.values(self._valuing, opened)
        names = ("sample_id", "prompt_id", "group_id")
        columns = {name: opened.table.column(name).to_pylist() for name in names}
        ragged = {name: _ragged(rows, len(columns["sample_id"])) for name, rows in values.items()}
        write_rows("values", folder, {**columns, **ragged})

        def content() -> str:
            contents = Contents()
            contents.add_table({**columns, **{name: rows.to_pylist() for name, rows in ragged.items()}})
            return str(contents)

        return Output(rows=opened.table.num_rows, content=content)

    @property
    def _valuing(self) -> ValueRequest:
        estimator = self.plan.estimator
        return ValueRequest(
            context=self.context,
            host=self.host,
            policy=self.inputs()[0],
            values=estimator.needs_values,
            reference=estimator.needs_reference,
        )


def _ragged(rows: list[np.ndarray] | None, count: int) -> pa.Array:
    """Return rows of float32 numbers as a column, null where there are none."""
    kind = pa.list_(pa.float32())
    return pa.nulls(count, kind) if rows is None else pa.array(rows, kind)
