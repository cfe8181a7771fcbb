"""Wire format of chains over HTTP: requests and answers of SGLang's diffusion server (``POST /rollout/generate``).

A request is JSON. An answer is msgpack: a list with one response, whose tensors are safetensors files in base64. Facts
from sglang ``multimodal_gen/runtime/entrypoints/post_training`` (``io_struct.py``, ``rollout_api.py``, ``utils.py``).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from flowmill.models.engines.answers import Malformed
from flowmill.models.engines.chains import Call, ChainRequest, DenoisingChain
from flowmill.models.policies.nan_checks import levels_in_words
from flowmill.models.serving import messages

GENERATE, FROM_DISK = "/rollout/generate", "/update_weights_from_disk"
#: Environment variable with the token that servers want.
TOKEN = "FLOWMILL_ROLLOUT_TOKEN"
#: Arguments of pipelines that are fields of a request.
_ARGUMENTS = ("width", "height", "num_inference_steps", "num_frames", "guidance_scale", "true_cfg_scale")
#: Maximum distance of a server's noise levels from the policy's.
_LEVELS = 1e-4


def request_of(call: Call, chain: ChainRequest) -> dict[str, Any]:
    """Return the body of a request; the server draws all noise of a chain from its one seed."""
    ode = not chain.stochastic
    return {
        "prompt": chain.prompt,
        "negative_prompt": call.arguments.get("negative_prompt"),
        "seed": chain.seed,
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
        "rollout_sde_step_indices": list(chain.stochastic),
        "rollout_return_step_indices": list(chain.states),
        "suppress_logs": True,
    }


def chain_of(body: bytes, call: Call, request: ChainRequest) -> DenoisingChain:
    """Return the chain in an answer. Raises WireError if the answer is cut or damaged; Malformed if it does not match
    the request: other states, shapes or noise levels, or numbers that are not finite."""
    responses = messages.unpack(body)
    if not isinstance(responses, list) or len(responses) != 1 or not isinstance(responses[0], Mapping):
        raise Malformed("it is no list with the one response that was asked for.")
    trajectory = responses[0].get("dit_trajectory")
    if not isinstance(trajectory, Mapping):
        raise Malformed("it has no 'dit_trajectory', so the server knows no rollouts.")
    sigmas = _floats(trajectory.get("sigmas"), "sigmas")
    if sigmas.shape != call.sigmas.shape or float((sigmas - call.sigmas.cpu()).abs().max()) > _LEVELS:
        raise Malformed(
            f"its noise levels are {levels_in_words(sigmas)}, but the policy's are {levels_in_words(call.sigmas)}. "
            "Give the server the scheduler of model.path, and its shift."
        )
    latents = _floats(trajectory.get("latents"), "latents")
    states = _states(trajectory.get("latent_step_indices"), request, call.steps, len(latents) if latents.ndim else 0)
    # Servers may keep a dimension of frames for images.
    shapes = [[size for size in shape if size > 1] for shape in (latents.shape, (len(states), *call.shape))]
    if shapes[0] == shapes[1]:
        latents = latents.reshape(len(states), *call.shape)
    if latents.shape != (len(states), *call.shape):
        raise Malformed(
            f"its latents have the shape {tuple(latents.shape)}, where {(len(states), *call.shape)} was asked for. The "
            "server has another model or size, or keeps latents in another layout."
        )
    places = [states.index(state) for state in request.states]
    log_probs = torch.zeros(call.steps)
    if request.trained:
        log_probs = _floats(responses[0].get("rollout_log_probs"), "rollout_log_probs", finite=request.trained)
        if log_probs.shape != (call.steps,):
            raise Malformed(f"it has log-probs of the shape {tuple(log_probs.shape)} for {call.steps} steps.")
    return DenoisingChain(latents=latents[places], states=request.states, sigmas=sigmas, log_probs=log_probs)


def _states(value: Any, request: ChainRequest, steps: int, count: int) -> list[int]:
    """Return the state of each latent; older servers do not say them."""
    if value is not None:
        states = [int(state) for state in _tensor(value, "latent_step_indices").flatten().tolist()]
    else:
        states = list(request.states) if count == len(request.states) else list(range(steps + 1))
    missing = [state for state in request.states if state not in states]
    if missing:
        raise Malformed(f"it lacks the latents of state {missing[0]}, which was asked for.")
    return states


def _floats(value: Any, label: str, finite: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a float32 tensor; ``finite``: the entries that have to be finite; None: all."""
    values = _tensor(value, label).float()
    whole = finite is None or values.ndim != 1 or len(values) <= max(finite)
    checked = values if whole else values[list(finite or ())]
    if not bool(torch.isfinite(checked).all()):
        raise Malformed(f"its {label} are not finite (NaN or infinite). The server's weights or dtype are at fault.")
    return values


def _tensor(value: Any, label: str) -> torch.Tensor:
    data = value.get("data") if isinstance(value, Mapping) else None
    if not isinstance(data, str):
        raise Malformed(f"it has no {label}.")
    tensor = _tensors(data, f"its {label}").get("t")
    if tensor is None:
        raise Malformed(f"it has no tensor in its {label}.")
    return tensor


def _tensors(text: str, label: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file in base64; raise WireError if it is damaged. ``label``: their name in
    messages."""
    try:
        return load(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, SafetensorError, KeyError) as error:
        raise messages.WireError(f"{label} are no safetensors in base64: {str(error)[:200]}") from None
