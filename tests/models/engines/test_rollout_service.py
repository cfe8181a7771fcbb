"""What a rollout server is sent: bounded, never unpickled, and refused where it is not the protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import httpx
import pytest
import torch

from configs.errors import EngineError
from models.engines import chain_wire
from models.engines.chain_wire import ChainRequest, TensorsDigest, pack_tensors
from models.engines.chains import Chain
from models.engines.rollout_service import make_app
from models.serving import messages


class Policy:
    """Draws zeros."""

    lost: ClassVar[type[EngineError]] = EngineError
    name, size, weights = "stub", 2, "base"

    def __init__(self) -> None:
        self.brought: dict[str, torch.Tensor] = {}

    def bring(self, name: str, tensors: Mapping[str, torch.Tensor], *, last: bool) -> None:
        self.brought |= tensors

    def admit(self, request: ChainRequest) -> None: ...

    def alike(self, request: ChainRequest) -> int:
        return 0

    def draw(self, requests: Sequence[ChainRequest]) -> list[Chain]:
        sigmas = torch.tensor([1.0, 0.5, 0.0])
        chain = Chain(latents=torch.zeros(2, 3), states=(0, 2), sigmas=sigmas, log_probs=torch.zeros(2))
        return [chain] * len(requests)


REQUEST: dict[str, Any] = {
    "prompt": "a",
    "seed": 1,
    "num_inference_steps": 2,
    "rollout_sde_type": "sde",
    "rollout_noise_level": 0.7,
    "rollout_return_dit_trajectory": True,
    "rollout_sde_step_indices": [0],
    "rollout_return_step_indices": [0, 2],
}
PART = {"load_format": "safetensors", "weights": "abc", "last": False}


def asked(path: str, body: Any, **about: Any) -> tuple[httpx.Response, Policy]:
    policy = Policy()
    app = make_app(policy, **about)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30) as client,
        ):
            return await client.post(path, content=content)

    return asyncio.run(ask()), policy


def test_an_answer_has_sglangs_fields_and_a_checksum() -> None:
    answer, _ = asked(chain_wire.GENERATE, REQUEST)
    assert answer.status_code == 200
    assert answer.headers[messages.CHECKSUM] == messages.checksum(answer.content)
    (found,) = messages.unpack(answer.content)
    assert {"prompt", "seed", "rollout_log_probs", "dit_trajectory"} <= set(found)
    latents = found["dit_trajectory"]["latents"]
    assert (latents["__tensor__"], latents["shape"], latents["dtype"]) == (True, [2, 3], "torch.float32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": -1}, "seed"),
        ({"rollout_return_step_indices": []}, "rollout_return_step_indices"),
        ({"image_path": ["/etc/passwd"]}, "image_path: Extra inputs are not permitted"),
        ({"extra_sampling_params": {"output_path": "/tmp"}}, "extra_sampling_params"),
        ({"num_outputs_per_prompt": 1000}, "num_outputs_per_prompt"),
        ({"rollout_debug_mode": True}, "rollout_debug_mode"),
    ],
)
def test_requests_that_are_not_the_protocol_are_refused(change: dict[str, Any], said: str) -> None:
    answer, _ = asked(chain_wire.GENERATE, {**REQUEST, **change})
    assert (answer.status_code, said in answer.json()["detail"]) == (400, True)


def test_weights_are_safetensors_and_nothing_else() -> None:
    tensors = {"a": torch.arange(3.0)}
    answer, policy = asked(chain_wire.FROM_TENSOR, {**PART, "serialized_named_tensors": [pack_tensors(tensors)]})
    assert answer.json()["success"] is True
    assert torch.equal(policy.brought["a"], tensors["a"])
    pickled = base64.b64encode(pickle.dumps(tensors)).decode()
    for text in (pickled, "no base64", base64.b64encode(b"\xff" * 16).decode()):
        answer, policy = asked(chain_wire.FROM_TENSOR, {**PART, "serialized_named_tensors": [text]})
        assert (answer.status_code, policy.brought) == (400, {})
        assert "are no safetensors in base64" in answer.json()["detail"]
    answer, _ = asked(
        chain_wire.FROM_TENSOR, {**PART, "load_format": "flattened_bucket", "serialized_named_tensors": [""]}
    )
    assert answer.status_code == 400


def test_bodies_are_bounded() -> None:
    answer, _ = asked(chain_wire.GENERATE, {**REQUEST, "prompt": "a" * 2000}, max_bytes=1000)
    assert answer.status_code == 413
    answer, _ = asked(chain_wire.GENERATE, REQUEST, token="secret")
    assert answer.status_code == 401


def test_a_digest_does_not_depend_on_parts_and_tells_tensors_apart() -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(2)}
    whole, parts = TensorsDigest(), TensorsDigest()
    whole.add(tensors)
    for name in sorted(tensors):
        parts.add({name: tensors[name]})
    assert str(whole) == str(parts)
    for other in ({"b": torch.ones(2)}, {**tensors, "a": torch.zeros(2, 1)}, {**tensors, "a": torch.ones(2)}):
        found = TensorsDigest()
        found.add(other)
        assert str(found) != str(whole)
