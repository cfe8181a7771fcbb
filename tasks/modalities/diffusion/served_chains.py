"""Draws chains for other processes: the policy behind ``flowmill serve-rollout``, with weights that clients bring.

Legend: B rows of a batch, T steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from configs.errors import EngineError, FlowmillError
from models.engines.chain_wire import ChainRequest, TensorsDigest
from models.engines.chains import BASE, Call, Chain
from models.maths.conditioning import Conditioning
from models.maths.sampling import Rollout, Sampler, sample
from models.maths.schedules import Steps
from models.policies.diffusion import TrainableDenoiser
from models.policies.kept import Kept
from models.policies.nan_checks import finite
from models.weights.finite import check_tensors
from tasks.inputs.components import make_kernel, make_solver
from tasks.inputs.prompts import Prompt, uses_guidance
from tasks.modalities.diffusion.engine_calls import call_of, sde_of, settings_of
from tasks.modalities.diffusion.rollout_sampling import initial_noise, step_noise

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.runtime.host import ModelHost

#: Encoded prompts that stay in memory.
_PROMPTS = 256


class OtherWeightsError(EngineError):
    """A request for weights that the server does not have."""


@dataclass(slots=True)
class _Incoming:
    """Weights that a client is bringing."""

    name: str
    tensors: dict[str, Tensor] = field(default_factory=dict)


class ServedChains:
    """A policy without a run: its base model, its trained tensors as the last client brought them."""

    lost: ClassVar[type[FlowmillError]] = OtherWeightsError

    def __init__(self, host: ModelHost, encode: Callable[[ModelHost, Sequence[Prompt]], Mapping[str, Tensor]]) -> None:
        """Load the models of a config. ``encode``: returns one row of each conditioning tensor per prompt."""
        self._host, self._config, self._encode_prompts = host, host.config, encode
        self._lock = threading.Lock()
        self._name, self._incoming = BASE, _Incoming("")
        self._encoded = Kept(_PROMPTS)
        self._held = cast(TrainableDenoiser, host.fresh())
        host.encoder()

    @property
    def name(self) -> str:
        """Name of the run whose config is served."""
        return self._host.context.run.name

    @property
    def size(self) -> int:
        """Maximum rows of a batch."""
        return self._config.execution.rollout_batch_size

    @property
    def weights(self) -> str:
        """Name of the weights that chains are drawn with."""
        return self._name

    def bring(self, name: str, tensors: Mapping[str, Tensor], *, last: bool) -> None:
        """Take a part of the trained tensors; after the last one, draw with them.

        Args:
            name: digest of all, or ``BASE``.
            tensors: some of them.
            last: all were brought.

        Raises:
            EngineError: they are not the trained tensors of the served model, not finite, or not those of the name.
        """
        with self._lock:
            if self._incoming.name != name:
                self._incoming = _Incoming(name)
            for key, tensor in tensors.items():
                shape = self._shapes.get(key)
                if shape != tensor.shape or not tensor.is_floating_point():
                    raise EngineError(
                        f"'{key[:100]}' of shape {list(tensor.shape)} is no trained tensor of the served model, which "
                        f"has {'none of this name' if shape is None else f'one of shape {list(shape)}'}. Serve the "
                        "run's config."
                    )
            self._incoming.tensors.update(tensors)
            if last:
                self._take(self._incoming)
                self._incoming = _Incoming("")

    def _take(self, brought: _Incoming) -> None:
        if brought.name == BASE:
            if self._name != BASE:
                if self._held.lora is not None:
                    raise EngineError("a policy with adapters has no weights without a name. Serve the run's config.")
                self._held.read(None)
            self._name = BASE
            return
        missing = sorted(set(self._shapes) - set(brought.tensors))
        digest = TensorsDigest()
        digest.add(brought.tensors)
        if missing or str(digest) != brought.name:
            lacks = f"'{missing[0]}' is missing" if missing else f"their digest is {digest}"
            raise EngineError(f"these are not the weights {brought.name}: {lacks}. Send them again.")
        check_tensors(brought.tensors, "the policy that was sent")
        # Until all are copied, the weights have no name.
        self._name = ""
        with torch.no_grad():
            for key, parameter in self._held.named_parameters():
                parameter.copy_(brought.tensors[key])
        self._held.changed()
        self._name = brought.name

    def admit(self, request: ChainRequest) -> None:
        """Check that a request is for chains of this config; its weights are checked when they are drawn.

        Raises:
            EngineError: it is not.
        """
        sde = sde_of(self._config.rollout.sampler.name, make_kernel(self._config))
        here: dict[str, object] = {"rollout.steps": self._call.steps}
        asked: dict[str, object] = {"rollout.steps": request.num_inference_steps}
        if request.rollout_sde_step_indices:
            here["noise"] = (sde.kind, sde.noise_level)
            asked["noise"] = (request.rollout_sde_type, request.rollout_noise_level)
        if request.own is not None:
            here, asked = {**self._settings, **here}, {**request.own.settings, **asked}
            if request.own.batch_size > self.size:
                here["execution.rollout_batch_size"] = self.size
                asked["execution.rollout_batch_size"] = request.own.batch_size
        for name in sorted({*here, *asked}):
            if here.get(name) != asked.get(name):
                raise EngineError(
                    f"{name} is {here.get(name)!r} here, but {asked.get(name)!r} in the run. Serve the run's config"
                )
        states, steps = request.rollout_return_step_indices, self._call.steps
        beyond = max(request.noise, default=0) >= steps or max(request.trained, default=-1) >= request.last
        if states != sorted(set(states)) or request.last > steps or beyond:
            raise EngineError(f"states ascend to at most {steps}, and steps come before the last of them")

    def alike(self, request: ChainRequest) -> tuple[object, ...]:
        """Return the properties of a batch: the last state, the number of trained steps, weights and batch size."""
        own = request.own
        about = None if own is None else (own.weights, own.batch_size, own.own is None)
        return request.last, len(request.trained), about

    def draw(self, requests: Sequence[ChainRequest]) -> list[Chain]:
        """Return the chains of requests that are ``alike``.

        Raises:
            OtherWeightsError: the server has other weights.
            SamplingError: latents or log-probs are not finite.
            ConfigError: a prompt holds control tokens.
        """
        with self._lock, torch.no_grad():
            self._host.use_threads()
            own = requests[0].own
            if own is not None and own.weights != self._name:
                raise OtherWeightsError(
                    f"it has the weights '{self._name}', not '{own.weights}': it was started again, or another run "
                    "uses it too"
                )
            size = self.size if own is None else own.batch_size
            padded = [*requests, *[requests[-1]] * (size - len(requests))]
            rollout = self._sampled(padded, self._conditioning([request.prompt for request in padded]))
            finite(rollout.log_probs[: len(requests)], "log-probs")
            finite(rollout.final[: len(requests)], "latents")
            return [self._chain(request, rollout, row) for row, request in enumerate(requests)]

    def _sampled(self, padded: Sequence[ChainRequest], conditioning: Conditioning) -> Rollout:
        policy, section = self._held.policy, self._config.rollout
        seeds, own = (
            [request.seed for request in padded],
            [request.own.own if request.own else None for request in padded],
        )
        latents = initial_noise(policy, seeds, own, section.own_noise)
        sigmas = self._call.sigmas.to(latents.device)
        latents = policy.started(latents, sigmas, conditioning)
        plans = [
            Steps(
                stochastic=tuple(request.rollout_sde_step_indices),
                trained=request.trained,
                kept=tuple(request.rollout_return_step_indices),
            )
            for request in padded
        ]
        return sample(
            self._held,
            conditioning,
            latents,
            sigmas,
            sampler=Sampler(kernel=make_kernel(self._config), solver=make_solver(section.solver, "rollout.solver")),
            plans=plans,
            noise=lambda step: step_noise([request.noise.get(step) for request in padded], latents),
            until=padded[0].last,
        )

    def _chain(self, request: ChainRequest, rollout: Rollout, row: int) -> Chain:
        assert rollout.states is not None
        log_probs = torch.zeros(self._call.steps)
        log_probs[list(request.trained)] = rollout.log_probs[row].cpu()
        states = tuple(request.rollout_return_step_indices)
        stored = sorted({*states, *(state for step in request.trained for state in (step, step + 1))})
        latents = rollout.states[row, [stored.index(state) for state in states]].cpu()
        return Chain(latents=latents, states=states, sigmas=self._call.sigmas, log_probs=log_probs)

    def _conditioning(self, prompts: Sequence[str]) -> Conditioning:
        def rows(texts: Sequence[str]) -> dict[str, Tensor]:
            found = [self._encoded.of(text, partial(self.encoded, text)) for text in texts]
            return {name: torch.stack([row[name] for row in found]) for name in found[0]}

        negative = [self._config.model.negative_prompt] * len(prompts)
        return Conditioning(rows(prompts), rows(negative) if uses_guidance(self._config) else None)

    def encoded(self, text: str) -> Mapping[str, Tensor]:
        """Return the row of a prompt, from a batch of the size that the stage ``encode`` uses."""
        size, host = self._config.execution.encode_batch_size, self._host
        encoded = self._encode_prompts(host, [Prompt(text=text)] * size)
        for name, rows in encoded.items():
            finite(rows[:1], f"embeddings '{name}'")
        # Positions, lengths and masks stay integers.
        return {
            name: rows[0].to(host.device, host.dtype if rows.is_floating_point() else rows.dtype)
            for name, rows in encoded.items()
        }

    @cached_property
    def _call(self) -> Call:
        return call_of(self._config, self._held.policy)

    @cached_property
    def _settings(self) -> Mapping[str, object]:
        return settings_of(self._config)

    @cached_property
    def _shapes(self) -> Mapping[str, torch.Size]:
        return self._held.shapes()
