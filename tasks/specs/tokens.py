"""Options of samples, training and exports of causal language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowmill.configs.critic import PLACES
from flowmill.configs.tokens import TokensSection
from flowmill.models.engines import engine_identity
from flowmill.models.policies.attention import LANGUAGE_BACKENDS
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.specs.modalities import ModalitySpec

#: How models were called in most runs on data, whose ids did not name it; those of rollouts name all.
_USUAL: Mapping[str, Any] = {"dtype": "bfloat16", "options": {}, "attention": None}


class TokensSpec(ModalitySpec):
    """How texts are sampled."""

    def called(self, plan: ResolvedConfig) -> dict[str, Any]:
        """Return how the model is called."""
        # All backends of transformers are exact; those of a custom family may not be.
        attention = None if plan.config.model.attention in LANGUAGE_BACKENDS else plan.config.model.attention
        return {"dtype": plan.config.model.dtype, "options": plan.config.model.options, "attention": attention}

    def stored(self, plan: ResolvedConfig) -> dict[str, Any]:
        """Return how media of samples are stored, if there are some."""
        return {}

    def encoding_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Nothing: prompts are taken as they are."""
        return {"policy": plan.config.model.policy}

    def rollout_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Groups, store, dtype, how tokens are drawn and by which other engine; not how evaluations draw."""
        names = ("prompts_per_epoch", "group_size", "store")
        rollout = {name: getattr(plan.config.rollout, name) for name in names}
        section = tokens_of(plan.config)
        drawn = {"tokens": _drawn(section), **engine_identity(section.engine)}
        return {"rollout": rollout, **drawn, **self.called(plan), **self.stored(plan)}

    def given_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Template and longest text."""
        without = {"evaluate", "engine", "rescore", "temperature", "stop"}
        return {"tokens": tokens_of(plan.config).fingerprinted(without), **self.stored(plan)}

    def evaluation_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """How tokens are drawn, or that the likeliest are taken."""
        section = tokens_of(plan.config)
        return {"tokens": _drawn(section), "evaluate": section.evaluate, **self.called(plan), **self.stored(plan)}

    def training_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """The temperature that log-probs belong to, and the critic where one is trained."""
        critic = {"critic": plan.config.critic.fingerprinted(PLACES)} if plan.estimator.needs_values else {}
        called = {} if plan.config.data is None else _unusual(TokensSpec.called(self, plan), *_USUAL)
        return {"temperature": tokens_of(plan.config).temperature, **critic, **called}

    def value_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """The temperature, and how the model is called."""
        return {"temperature": tokens_of(plan.config).temperature, **self.called(plan)}

    def export_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """How the card says the model is called."""
        return {"tokens": tokens_of(plan.config).fingerprinted({"engine", "rescore"}), **self.called(plan)}


def _drawn(section: TokensSection) -> dict[str, Any]:
    return section.fingerprinted({"evaluate", "engine"})


def _unusual(called: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: called[name] for name in names if called[name] != _USUAL[name]}


class ImageTokensSpec(TokensSpec):
    """How tokens are sampled, with guidance, and how images are stored."""

    def called(self, plan: ResolvedConfig) -> dict[str, Any]:
        """Return how the model is called, with its guidance."""
        return {**super().called(plan), **_guided(plan)}

    def stored(self, plan: ResolvedConfig) -> dict[str, Any]:
        """Return how images are stored."""
        return {"media": plan.config.rollout.media.fingerprinted()}

    def given_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Those of tokens, and how the model that codes images is called."""
        return {**super().given_options(plan), **_unusual(super().called(plan), "dtype", "options")}

    def training_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        """Those of tokens, and the guidance that log-probs belong to; of ingested images there is none."""
        return {**super().training_options(plan), **(_guided(plan) if plan.config.data is None else {})}


def _guided(plan: ResolvedConfig) -> dict[str, Any]:
    # It is off up to 1.
    return {"guidance_scale": max(1.0, plan.config.model.guidance_scale)}
