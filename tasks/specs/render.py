"""Which images were drawn of which texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from tasks.inputs.renderer import render_of, renderer_config
from tasks.specs.base_spec import StageSpec
from tasks.specs.graph import RENDERER, Node
from tasks.specs.modalities import modality_spec


class DrawingSpec(StageSpec):
    """Images of texts by the frozen image model."""

    kind = "renders"

    def options(self) -> Mapping[str, Any]:
        """How many images of each text, how they are drawn, and from which noise."""
        section, drawer = render_of(self.config), renderer_config(self.config)
        return {
            "images": section.images,
            **({} if section.answer is None else {"answer": list(section.answer)}),
            "same_noise": section.same_noise,
            "store": self.config.rollout.store,
            **modality_spec(drawer).evaluation_options(drawer),
            **self.draws(),
        }

    @abstractmethod
    def draws(self) -> Mapping[str, int]:
        """Return what noise is drawn with."""


class RenderSpec(DrawingSpec):
    """Images of an epoch's texts."""

    name = "render"

    def draws(self) -> Mapping[str, int]:
        """Run seed and epoch."""
        return {"seed": self.config.run.seed, "epoch": self.epoch}

    def upstream(self) -> tuple[Node, ...]:
        """The texts, the image model."""
        return (Node(self.epoch, "rollout"), Node(0, "base", RENDERER))


class DepictSpec(DrawingSpec):
    """Images of an evaluation's texts, from fixed noise; ``slot`` names an evaluation beside the run's own."""

    name = "depict"

    def draws(self) -> Mapping[str, int]:
        """The evaluation's seed."""
        return {"seed": self.config.evaluate.seed}

    def upstream(self) -> tuple[Node, ...]:
        """The texts, the image model."""
        return (Node(self.epoch, "evaluate", self.slot), Node(0, "base", RENDERER))
