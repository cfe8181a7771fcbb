"""The plan of a run, resolved once from its config: its components, and the graph of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import takewhile
from typing import Any

from flowmill.configs.registry import create
from flowmill.configs.rewards import RewardSection
from flowmill.tasks.inputs.policy_kind import kind_name
from flowmill.tasks.inputs.renderer import reads_images
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.specs.graph import HELD_OUT, OF, RENDERER, TURN, Node, policy_after
from flowmill.tasks.specs.modalities import MODALITIES, MODALITY_SPECS, ModalitySpec
from flowmill.tasks.specs.stages import STAGES, names_of
from flowmill.tasks.specs.turns import episode


class RunPlan(ResolvedConfig):
    """A resolved config with the kind of its policy, and the stages of its run in order."""

    @cached_property
    def modality(self) -> Any:
        """The modality of the policy, a ``flowmill.tasks.modalities.modality.Modality``."""
        return create(MODALITIES, kind_name(self.config), {}, label="model.kind")

    @cached_property
    def modality_spec(self) -> ModalitySpec:
        """The options of stages that only this kind of policy has."""
        spec: ModalitySpec = create(MODALITY_SPECS, kind_name(self.config), {}, label="model.kind")
        return spec

    @property
    def has_data(self) -> bool:
        """Whether the run trains on samples of ``data``, and has neither rollouts nor scores of them."""
        return self.config.data is not None

    @property
    def desired_alone(self) -> dict[str, bool]:
        """An option of stages with losses of desired samples alone, if the run may have others.

        For earlier versions those were rows of loss 0, which counted in means.
        """
        data = self.config.data
        others = data is None or data.paired or data.rating is not None
        return {"desired_alone": True} if self.needs.desired and others else {}

    @property
    def has_losses(self) -> bool:
        """Whether the losses of policies on held-out rows are computed."""
        return self.config.data is not None and self.config.data.heldout is not None

    def has(self, stage: str) -> bool:
        """Return whether the run can have a stage: some belong to samples of ``data``, others to rollouts."""
        return STAGES[stage].with_data in (None, self.has_data)

    def samples_of(self, epoch: int, *, evaluation: bool = False) -> Node:
        """Return the stage whose artifact holds the samples that an epoch trains on, or those of its evaluation."""
        if evaluation:
            return Node(epoch, "evaluate")
        return Node(0, "ingest") if self.has_data else Node(epoch, "rollout")

    @property
    def has_values(self) -> bool:
        """Whether there is a values stage, for a critic's values or per-token log-probs of the base model."""
        return self.estimator.needs_values or self.estimator.needs_reference

    @property
    def has_gradients(self) -> bool:
        """Whether there are stages of gradients, one for each reward, because the algorithm trains on them."""
        return self.needs.gradients

    def nodes(self) -> Iterator[Node]:
        """Yield all stages of the run, each after those it reads."""
        yield from self.setup()
        yield from self.evaluation(0)
        for epoch in range(1, self.config.run.epochs + 1):
            yield from self.scored(epoch)
            yield from self.training(epoch)
            if self.is_evaluated(epoch):
                yield from self.evaluation(epoch)
        yield Node(self.config.run.epochs, "export")

    def setup(self) -> Iterator[Node]:
        """Yield the stages that belong to the run as a whole, before all others."""
        yield Node(0, "base")
        if self.config.render is not None:
            yield Node(0, "base", RENDERER)
        yield from (Node(0, name) for name in names_of("run") if name != "base" and self.has(name))
        if self.has_losses:
            yield Node(0, "ingest", HELD_OUT)

    def scored(self, epoch: int) -> Iterator[Node]:
        """Yield the stages from an epoch's policy to its scores."""
        if self.has_data:
            return
        yield from self.choices(epoch)
        yield from episode(self.config, epoch, evaluation=False)
        yield from (Node(epoch, "score", reward.slot) for reward in self.config.scored)

    def choices(self, epoch: int) -> Iterator[Node]:
        """Yield the stage that chooses an epoch's prompts; none where no rewards are read for it."""
        if self.config.prompts.chooses:
            yield Node(epoch, "choose")

    def before_rollout(self, epoch: int) -> Iterator[Node]:
        """Yield the stages of an epoch before its rollout: the choice of prompts, and earlier turns."""
        return takewhile(lambda node: node != Node(epoch, "rollout"), self.scored(epoch))

    def rendered(self, epoch: int) -> Iterator[Node]:
        """Yield the stages that render an epoch's texts and score the images; none in runs without ``render``."""
        if self.config.render is not None:
            yield Node(epoch, "render")
            yield from (Node(epoch, "score", each.slot) for each in self.config.scored if self._reads_images(each))

    def training(self, epoch: int) -> Iterator[Node]:
        """Yield the stages from an epoch's scores to its policy."""
        if self.has_values:
            yield Node(epoch, "value")
        yield from self.gradients(epoch)
        yield Node(epoch, "advantage")
        yield Node(epoch, "optimize")

    def gradients(self, epoch: int) -> Iterator[Node]:
        """Yield the stages with the gradients of an epoch's rewards, if any."""
        if self.has_gradients:
            yield from (Node(epoch, "gradient", reward.slot) for reward in self.config.rewards)

    def evaluation(self, epoch: int, name: str = "") -> Iterator[Node]:
        """Yield the stages of one evaluation; ``name`` is empty for the run's own."""
        yield from episode(self.config, epoch, name, evaluation=True)
        for reward in (*self.config.rewards, *self.config.evaluate.judges):
            yield Node(epoch, "judge", f"{reward.slot}{OF}{name}" if name else reward.slot)
        if self.has_losses and not name:
            yield Node(epoch, "validate")

    def of_stage(self, epoch: int, stage: str) -> list[Node]:
        """Return the nodes of a stage of training in an epoch, several for a stage with slots; not of earlier turns."""
        nodes = (*self.scored(epoch), *self.training(epoch))
        return [node for node in nodes if node.stage == stage and TURN not in node.slot]

    def policy_of(self, epoch: int) -> Node:
        """Return the stage that makes the policy of an epoch's rollout: the one before, older with ``ahead``."""
        return policy_after(max(0, epoch - 1 - self.config.execution.ahead))

    def rollouts_from(self, epoch: int) -> range:
        """Return the epochs whose rollouts can start with an epoch; several with ``execution.ahead``."""
        return range(epoch, min(epoch + self.config.execution.ahead, self.config.run.epochs) + 1)

    def is_evaluated(self, epoch: int) -> bool:
        """Return whether the policy after an epoch is evaluated: at the interval of the config, and the last."""
        return epoch == self.config.run.epochs or epoch % self.config.evaluate.every == 0

    @property
    def evaluations(self) -> int:
        """The number of evaluations of the run, that of the base policy included."""
        return 1 + sum(self.is_evaluated(epoch) for epoch in range(1, self.config.run.epochs + 1))

    def media_of(self, epoch: int, *, evaluation: bool) -> Node:
        """Return the stage with the media of an epoch's samples, or of its evaluation."""
        if self.config.render is not None:
            return Node(epoch, "depict" if evaluation else "render")
        return self.samples_of(epoch, evaluation=evaluation)

    def scored_by(self, reward: RewardSection, epoch: int, turn: str = "") -> Node:
        """Return the stage whose artifact a reward scores in an epoch: the samples, or their renders.

        ``turn`` is the slot of a turn before the last.
        """
        return Node(epoch, "render" if self._reads_images(reward) else "rollout", turn)

    def judged_by(self, reward: RewardSection, epoch: int, name: str = "") -> Node:
        """Return the stage whose artifact a reward scores in an evaluation, see ``scored_by``."""
        return Node(epoch, "depict" if self._reads_images(reward) else "evaluate", name)

    def _reads_images(self, reward: RewardSection) -> bool:
        return reads_images(self.config, reward)
