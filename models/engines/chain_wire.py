"""Wire format of chains over HTTP: requests and answers of SGLang's diffusion server (``POST /rollout/generate``).

A request is JSON. An answer is msgpack: a list with one response, whose tensors are safetensors files in base64. Facts
from sglang ``multimodal_gen/runtime/entrypoints/post_training`` (``io_struct.py``, ``rollout_api.py``, ``utils.py``).
Values without a field in its requests, such as a seed per step, are below ``flowmill`` in ``extra_sampling_params``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from configs.validation_messages import first_error
from models.engines.answers import Malformed
from models.engines.chains import Call, Chain, Wanted
from models.serving import messages

GENERATE, HEALTH, HELD = "/rollout/generate", "/health", "/get_weights_checksum"
FROM_TENSOR, FROM_DISK = "/update_weights_from_tensor", "/update_weights_from_disk"
#: Environment variable with the token, on both sides.
TOKEN = "FLOWMILL_ROLLOUT_TOKEN"
#: Key of the extension, and of the digest of trained tensors in ``HELD``.
EXTENSION = "flowmill"
#: Arguments of pipelines that are fields of a request.
_ARGUMENTS = ("width", "height", "num_inference_steps", "num_frames", "guidance_scale", "true_cfg_scale")
#: Maximum distance of a server's noise levels from the policy's.
_LEVELS = 1e-4
_Step = Annotated[int, Field(ge=0, lt=1 << 16)]
_Seed = Annotated[int, Field(ge=0, lt=1 << 63)]


class Extension(BaseModel):
    """The part of a request that SGLang has no fields for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: str
    """Digest of the trained tensors to draw with."""
    settings: dict[str, Any]
    """``Call.settings``; a server with others refuses the request."""
    batch_size: int = Field(ge=1, le=1 << 16)
    """Rows of a forward."""
    own: _Seed | None = None
    """``Wanted.own``."""
    noise: dict[_Step, _Seed]
    """``Wanted.noise``."""
    trained: list[_Step]
    """``Wanted.trained``."""


class Extra(BaseModel):
    """Further sampling parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flowmill: Extension


class ChainRequest(BaseModel):
    """A request for one chain: the fields of SGLang's ``RolloutRequest`` that have an effect here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(max_length=1 << 16)
    negative_prompt: str | None = Field(None, max_length=1 << 16)
    seed: _Seed
    generator_device: str = "cpu"
    width: int | None = None
    height: int | None = None
    num_inference_steps: int = Field(ge=1, le=10_000)
    num_frames: int | None = None
    num_outputs_per_prompt: Literal[1] | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    rollout: Literal[True] = True
    rollout_sde_type: str
    rollout_noise_level: float
    rollout_log_prob_no_const: bool = False
    rollout_debug_mode: Literal[False] = False
    rollout_return_denoising_env: Literal[False] = False
    rollout_return_dit_trajectory: Literal[True]
    rollout_sde_step_indices: list[_Step] = Field(max_length=10_000)
    rollout_return_step_indices: list[_Step] = Field(min_length=1, max_length=10_000)
    suppress_logs: bool = True
    extra_sampling_params: Extra | None = None

    @property
    def own(self) -> Extension | None:
        """The extension."""
        return None if self.extra_sampling_params is None else self.extra_sampling_params.flowmill

    @property
    def last(self) -> int:
        """The last state, at which the chain may end."""
        return self.rollout_return_step_indices[-1]

    @property
    def noise(self) -> dict[int, int]:
        """The seed of the noise of each stochastic step; without the extension, from the seed of the chain."""
        own = self.own
        return own.noise if own else {step: self.seed ^ (step + 1) for step in self.rollout_sde_step_indices}

    @property
    def trained(self) -> tuple[int, ...]:
        """The steps whose log-probs are wanted."""
        return tuple(self.own.trained if self.own else self.rollout_sde_step_indices)


def request_of(call: Call, wanted: Wanted, *, weights: str | None) -> dict[str, Any]:
    """Return the body of a request. ``weights``: digest of the weights for a server with the extension; None: SGLang,
    which draws all noise of a chain from its one seed."""
    ode = not wanted.noise
    body = {
        "prompt": wanted.prompt,
        "negative_prompt": call.arguments.get("negative_prompt"),
        "seed": wanted.initial,
        **{name: call.arguments[name] for name in _ARGUMENTS if name in call.arguments},
        "num_inference_steps": call.steps,
        "num_outputs_per_prompt": 1,
        "rollout": True,
        "rollout_sde_type": "ode" if ode else call.sde.kind,
        "rollout_noise_level": 0.0 if ode else call.sde.noise_level,
        # A chain without noise has no density.
        "rollout_log_prob_no_const": ode or call.sde.squared,
        "rollout_debug_mode": False,
        "rollout_return_denoising_env": False,
        "rollout_return_dit_trajectory": True,
        "rollout_sde_step_indices": list(wanted.stochastic),
        "rollout_return_step_indices": list(wanted.states),
        "suppress_logs": True,
    }
    if weights is not None:
        extension = {"weights": weights, "settings": dict(call.settings), "batch_size": call.batch_size}
        seeds = {"own": wanted.own, "noise": dict(wanted.noise), "trained": list(wanted.trained)}
        body |= {"generator_device": "cpu", "extra_sampling_params": {EXTENSION: {**extension, **seeds}}}
    return body


def read_request(body: bytes) -> ChainRequest:
    """Return the request in a body; raise WireError if there is none."""
    try:
        return ChainRequest.model_validate_json(body)
    except ValidationError as error:
        raise messages.WireError(first_error(error)) from None


def pack_chain(request: ChainRequest, chain: Chain) -> bytes:
    """Return the body of an answer."""
    trajectory = {
        "latents": _packed(chain.latents),
        "timesteps": _packed(chain.sigmas * 1000),
        "sigmas": _packed(chain.sigmas),
        "latent_step_indices": _packed(torch.tensor(chain.states)),
    }
    answer = {"request_id": "", "prompt": request.prompt, "seed": request.seed, "dit_trajectory": trajectory}
    return messages.pack([{**answer, "rollout_log_probs": _packed(chain.log_probs)}])


def chain_of(body: bytes, call: Call, wanted: Wanted) -> Chain:
    """Return the chain in an answer. Raises WireError if the answer is cut or damaged; Malformed if it does not match
    the request: other states, shapes or noise levels, or numbers that are not finite."""
    found = messages.unpack(body)
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], Mapping):
        raise Malformed("it is no list with the one response that was asked for.")
    trajectory = found[0].get("dit_trajectory")
    if not isinstance(trajectory, Mapping):
        raise Malformed("it has no 'dit_trajectory', so the server knows no rollouts.")
    sigmas = _floats(trajectory.get("sigmas"), "sigmas")
    if sigmas.shape != call.sigmas.shape or float((sigmas - call.sigmas.cpu()).abs().max()) > _LEVELS:
        raise Malformed(
            f"its noise levels are {_shown(sigmas)}, but the policy's are {_shown(call.sigmas)}. Give the server the "
            "scheduler of model.path, and its shift."
        )
    latents = _floats(trajectory.get("latents"), "latents")
    states = _states(trajectory.get("latent_step_indices"), wanted, call.steps, len(latents) if latents.ndim else 0)
    # Servers may keep a dimension of frames for images.
    shapes = [[size for size in shape if size > 1] for shape in (latents.shape, (len(states), *call.shape))]
    if shapes[0] == shapes[1]:
        latents = latents.reshape(len(states), *call.shape)
    if latents.shape != (len(states), *call.shape):
        raise Malformed(
            f"its latents have the shape {tuple(latents.shape)}, where {(len(states), *call.shape)} was asked for. The "
            "server has another model or size, or keeps latents in another layout."
        )
    places = [states.index(state) for state in wanted.states]
    log_probs = torch.zeros(call.steps)
    if wanted.trained:
        log_probs = _floats(found[0].get("rollout_log_probs"), "rollout_log_probs", finite=wanted.trained)
        if log_probs.shape != (call.steps,):
            raise Malformed(f"it has log-probs of the shape {tuple(log_probs.shape)} for {call.steps} steps.")
    return Chain(latents=latents[places], states=wanted.states, sigmas=sigmas, log_probs=log_probs)


def _states(value: Any, wanted: Wanted, steps: int, count: int) -> list[int]:
    """Return the state of each latent; older servers do not say them."""
    if value is not None:
        states = [int(state) for state in _tensor(value, "latent_step_indices").flatten().tolist()]
    else:
        states = list(wanted.states) if count == len(wanted.states) else list(range(steps + 1))
    missing = [state for state in wanted.states if state not in states]
    if missing:
        raise Malformed(f"it lacks the latents of state {missing[0]}, which was asked for.")
    return states


def _floats(value: Any, label: str, finite: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a float32 tensor; ``finite``: the entries that have to be finite; None: all."""
    found = _tensor(value, label).float()
    whole = finite is None or found.ndim != 1 or len(found) <= max(finite)
    checked = found if whole else found[list(finite or ())]
    if not bool(torch.isfinite(checked).all()):
        raise Malformed(f"its {label} are not finite (NaN or infinite). The server's weights or dtype are at fault.")
    return found


def _tensor(value: Any, label: str) -> torch.Tensor:
    data = value.get("data") if isinstance(value, Mapping) else None
    if not isinstance(data, str):
        raise Malformed(f"it has no {label}.")
    found = unpack_tensors(data, f"its {label}").get("t")
    if found is None:
        raise Malformed(f"it has no tensor in its {label}.")
    return found


def _packed(tensor: torch.Tensor) -> dict[str, Any]:
    about = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}
    return {"__tensor__": True, "data": pack_tensors({"t": tensor}), **about}


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return tensors as a safetensors file in base64."""
    return base64.b64encode(save({name: each.detach().cpu().contiguous() for name, each in tensors.items()})).decode()


def unpack_tensors(text: str, label: str) -> dict[str, torch.Tensor]:
    """Return the tensors of ``pack_tensors``; raise WireError if it is damaged. ``label``: their name in messages."""
    try:
        return load(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, SafetensorError, KeyError) as error:
        raise messages.WireError(f"{label} are no safetensors in base64: {str(error)[:200]}") from None


class TensorsDigest:
    """Digest of named tensors, which does not depend on their split into parts."""

    def __init__(self) -> None:
        """Begin without tensors."""
        self._found: dict[str, str] = {}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors."""
        for name, tensor in tensors.items():
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            self._found[name] = f"{tensor.dtype} {list(tensor.shape)} {xxhash.xxh3_128_hexdigest(data)}"

    def __str__(self) -> str:
        lines = "\n".join(f"{name} {self._found[name]}" for name in sorted(self._found))
        return xxhash.xxh3_128_hexdigest(lines.encode())


def _shown(levels: torch.Tensor) -> str:
    found = [f"{level:.4g}" for level in levels.flatten().tolist()]
    return ", ".join(found if len(found) < 7 else [*found[:3], "...", *found[-2:]])
