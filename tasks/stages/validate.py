"""The loss of a policy on held-out rows of the data, by the algorithm's own objective and without a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import canonical_json
from flowmill.models.policies.parts import Part
from flowmill.tasks.inputs.data_section import data_of
from flowmill.tasks.inputs.option_paths import OptionPath, algorithm_places
from flowmill.tasks.specs.graph import HELD_OUT, Node, policy_after
from flowmill.tasks.stages.stage import Output, Shard, Stage


class ValidateStage(Stage):
    """Mean loss and metrics of all held-out rows, with the weights and at the epochs of evaluations.

    Noise levels and noise are those of epoch 0, which trains nothing: equal for all policies, so that curves compare.
    """

    collective = True
    only = "losses"

    def take_slot(self) -> None:
        if not self.plan.has_losses:
            raise ConfigError("stage 'validate' needs held-out rows of given data. Set data.heldout.")

    def options(self) -> Mapping[str, Any]:
        data = data_of(self.config)
        return {
            "algorithm": self.config.optimize.fingerprinted()["algorithm"],
            **self.plan.modality_spec.training_options(self.plan),
            "average": self.config.optimize.ema is not None,
            "given": {"scale": list(data.scale), "neutral": data.middle},
            **self.plan.desired_alone,
            "seed": self.config.run.seed,
        }

    def places(self) -> tuple[OptionPath, ...]:
        return algorithm_places(self.config)

    def upstream(self) -> tuple[Node, ...]:
        return (policy_after(self.epoch), Node(0, "ingest", HELD_OUT))

    @property
    def parts(self) -> frozenset[Part]:
        return self.modality.training_parts

    @property
    def sizes(self) -> Mapping[str, int | None]:
        return {"micro_batch_size": self.config.execution.micro_batch_size}

    def run(self, shard: Shard, folder: Path) -> Output:
        from flowmill.tasks.training.data import HeldOutData
        from flowmill.tasks.training.epoch import TrainingEpoch

        data = HeldOutData(self.context, self.modality, 0, self.inputs())
        figures, rows = TrainingEpoch(data, self.host, self.ref).losses()
        if self.host.ranks.first:
            (folder / "figures.json").write_text(canonical_json(figures))
        return Output(rows=rows, summary=figures)
