"""The frozen model that renders texts, in one process: loaded on first use, until ``forget``."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from flowmill.models.devices import chosen_device, local_rank
from flowmill.models.policies.base import Policy
from flowmill.models.policies.parts import Part
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runtime.devices import free_cached_memory, module_bytes
from flowmill.tasks.specs.graph import RENDERER

_PARTS = frozenset({Part.TEXT, Part.DENOISER, Part.VAE})


class Renderer:
    """Encodes and renders texts; its weights never change."""

    def __init__(self, context: RunContext) -> None:
        """Bind to a run with a renderer; no model is loaded yet."""
        self.config = context.plan.drawer.config
        """A config with the renderer as its model."""
        self._context = context
        self._policy: Policy | None = None

    @cached_property
    def device(self) -> torch.device:
        """The device of the renderer; with several devices of a kind, the one of the local rank."""
        return chosen_device(self.config.execution.device, local_rank())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and forwards."""
        return getattr(torch, self.config.model.dtype)  # type: ignore[no-any-return]

    def policy(self) -> Any:
        """Return the model with its text encoders, as a policy."""
        if self._policy is None:
            model, family = self.config.model, self._context.plan.drawer.family
            self._context.check_model(model, RENDERER)
            settings = family.settings_for(self.config, dtype=self.dtype, device=self.device, empty=False)
            policy = family.load(self._context.renderer_folder, settings, _PARTS, model.options)
            self._policy = policy.computing_dequantized(model.quantize, _PARTS)
        return self._policy

    def loaded(self) -> int:
        """Return the bytes of its parameters and buffers."""
        return 0 if self._policy is None else sum(map(module_bytes, self._policy.modules().values()))

    def make_room(self) -> None:
        """Release the model from an accelerator."""
        if self._policy is not None and self.device.type != "cpu":
            self.forget()

    def forget(self) -> None:
        """Drop it."""
        if self._policy is not None:
            self._policy = None
            free_cached_memory(self.device)
