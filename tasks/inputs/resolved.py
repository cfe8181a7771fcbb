"""A config with the components that it names, each resolved once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from flowmill.configs.algorithm_defaults import AlgorithmNeeds
from flowmill.configs.model_families import FamilySpec, most_images, spec_of
from flowmill.configs.registry import build, resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.policies import POLICIES
from flowmill.tasks.advantages.estimators import Estimator, make_estimator
from flowmill.tasks.algorithms.base import Algorithm, Requirements
from flowmill.tasks.inputs.components import algorithm_needs, as_evaluated, lora_spec, make_algorithm
from flowmill.tasks.inputs.prompts import Prompt
from flowmill.tasks.inputs.renderer import renderer_config
from flowmill.tasks.inputs.source_prompts import source_prompts

if TYPE_CHECKING:
    from flowmill.models.weights.lora import LoraSpec


class ResolvedConfig:
    """A config and its components, which are created at first use and stay."""

    def __init__(self, config: RunConfig) -> None:
        """Bind to a config.

        Properties raise ConfigError if the config names a component that does not exist.
        """
        self.config = config

    @cached_property
    def family(self) -> Any:
        """The class of the policy, a ``flowmill.models.policies.base.Policy``."""
        return resolve(POLICIES, self.config.model.policy, label="model.policy")

    @property
    def family_spec(self) -> FamilySpec:
        """The constants of the family."""
        return spec_of(self.config.model.policy)

    @cached_property
    def model_options(self) -> Any:
        """The options of the family, with their defaults."""
        name, options = self.config.model.policy, self.config.model.options
        return build(self.family.options_type, name, options, label="model.options of")

    @property
    def most_images(self) -> int | None:
        """Most images that a prompt can have; None: any number."""
        return most_images(self.config.model.policy, self.config.model.options)

    @cached_property
    def lora(self) -> LoraSpec | None:
        """The adapters to train; None: all weights are trained."""
        return lora_spec(self.config, self.family)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The training objective."""
        return make_algorithm(self.config)

    @property
    def requires(self) -> Requirements:
        """The requirements of the algorithm."""
        return self.algorithm.requires

    @cached_property
    def needs(self) -> AlgorithmNeeds:
        """The requirements of the algorithm that determine stages, as recorded where its code is not imported."""
        return algorithm_needs(self.config)

    @cached_property
    def estimator(self) -> Estimator:
        """The estimator of advantages."""
        return make_estimator(self.config)

    @cached_property
    def prompts(self) -> dict[str, Sequence[Prompt]]:
        """The prompts that the config names, by split."""
        return source_prompts(self.config)

    @property
    def prompt_counts(self) -> dict[str, int]:
        """The number of those prompts by split."""
        return {split: len(prompts) for split, prompts in self.prompts.items()}

    @cached_property
    def drawer(self) -> Self:
        """The image model of a config with a section ``render``, as the model of a config."""
        return type(self)(renderer_config(self.config))

    @cached_property
    def evaluated(self) -> Self:
        """The config with the sizes of evaluations."""
        config = as_evaluated(self.config)
        return self if config is self.config else type(self)(config)

    def sized(self, height: int, width: int) -> Self:
        """Return the config with images of another size."""
        model = self.config.model.model_copy(update={"height": height, "width": width})
        return type(self)(self.config.model_copy(update={"model": model}))
