"""Wire format between a run and a reward server: msgpack, never pickle, with a checksum of every body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.validation_messages import first_error
from flowmill.models.rewards.base import Batch, Needs, Scores, Sources
from flowmill.models.serving.messages import MOST_ROWS, WireError, pack, unpack

SCORE, INFO, HEALTH = "/v1/score", "/v1/info", "/health"
#: Header of a request: the requested reward, see ``identity``.
REWARD = "x-flowmill-reward"
#: Environment variable with the token, on both sides.
TOKEN = "FLOWMILL_REWARD_TOKEN"


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


M = TypeVar("M", bound=_Message)
_Texts = Annotated[list[str], Field(max_length=MOST_ROWS)]


class ReferenceImage(_Message):
    """A source image of prompts."""

    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 16)]], Field(min_length=3, max_length=3)]
    """(H, W, 3)."""
    data: bytes
    """Uint8, in C order."""


class ScoreRequest(_Message):
    """Samples to score."""

    dtype: Literal["uint8", "float32", "text"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 40)]], Field(min_length=1, max_length=8)]
    media: bytes | _Texts
    """Values in C order; a list of texts."""
    prompts: _Texts
    """One per row."""
    metadata: Annotated[list[dict[str, Any]], Field(max_length=MOST_ROWS)]
    """One per row."""
    images: Annotated[list[ReferenceImage], Field(max_length=MOST_ROWS)] = []
    """The source images, each once."""
    references: Annotated[list[list[Annotated[int, Field(ge=0)]]], Field(max_length=MOST_ROWS)] = []
    """Indices into ``images`` of every row's source images, in order; empty if the reward does not need them."""


class ScoreAnswer(_Message):
    """Scores of samples."""

    scores: bytes
    """Float32, little-endian."""
    notes: _Texts | None
    """One per row, or None."""


class NeedsFields(_Message):
    """The fields of ``Needs``."""

    media: Literal["images", "clips", "sounds", "latents", "texts"]
    rate: int | None = Field(None, ge=1)
    columns: _Texts
    groupwise: bool
    references: bool = False
    accelerated: bool
    batch_size: int | None = Field(ge=1)


class RewardInfo(_Message):
    """The reward of a server."""

    name: str
    """Name in the table, or an import string."""
    options: dict[str, Any]
    needs: NeedsFields
    perfect: float | None = Field(allow_inf_nan=False)
    """The score that counts as an exact match."""
    max_bytes: int = Field(ge=1)
    """The largest request body."""


def pack_request(batch: Batch) -> bytes:
    """Return the body of a request for the scores of samples."""
    texts = batch.media.dtype == object
    return pack(
        {
            "dtype": "text" if texts else str(batch.media.dtype),
            "shape": list(batch.media.shape),
            "media": batch.media.tolist() if texts else np.ascontiguousarray(batch.media).tobytes(),
            "prompts": list(batch.prompts),
            "metadata": [dict(row) for row in batch.metadata],
            **_packed_references(batch.references),
        }
    )


def distinct(references: Sources) -> list[np.ndarray]:
    """Return the source images of rows, each once: rows of one prompt share the same objects."""
    return list({id(image): image for images in references for image in images}.values())


def _packed_references(references: Sources) -> dict[str, Any]:
    if not references:
        return {}
    images = distinct(references)
    places = {id(image): place for place, image in enumerate(images)}
    return {
        "images": [{"shape": list(image.shape), "data": np.ascontiguousarray(image).tobytes()} for image in images],
        "references": [[places[id(image)] for image in row] for row in references],
    }


def _unpacked_references(request: ScoreRequest) -> list[list[np.ndarray]]:
    images = []
    for image in request.images:
        if image.shape[-1] != 3 or len(image.data) != math.prod(image.shape):
            raise WireError(f"an image to start from has {len(image.data)} bytes and the shape {image.shape}")
        images.append(np.frombuffer(image.data, np.uint8).reshape(image.shape))
    if request.references and len(request.references) != len(request.prompts):
        raise WireError(f"{len(request.references)} references of {len(request.prompts)} prompts")
    if any(place >= len(images) for row in request.references for place in row):
        raise WireError(f"references to more than the {len(images)} images there are")
    return [[images[place] for place in row] for row in request.references]


def unpack_request(body: bytes) -> Batch:
    """Return the samples in a body; raise WireError if it has none, or they do not match its shape and dtype."""
    request = _read(ScoreRequest, body)
    media, shape = request.media, tuple(request.shape)
    texts = isinstance(media, list)
    if texts != (request.dtype == "text"):
        raise WireError(f"media of dtype {request.dtype} are {'texts' if texts else 'bytes'}")
    size = math.prod(shape) * (1 if texts else np.dtype(request.dtype).itemsize)
    if min(shape, default=0) < 1 or len(media) != size:
        unit = "texts" if texts else "bytes"
        raise WireError(f"media have {len(media)} {unit}, but shape {shape} of {request.dtype} is {size}")
    if not shape[0] == len(request.prompts) == len(request.metadata):
        raise WireError(f"{shape[0]} media, {len(request.prompts)} prompts and {len(request.metadata)} metadata")
    if request.dtype == "uint8" and (len(shape) not in (4, 5) or shape[-1] != 3):
        raise WireError(f"uint8 media must be (B, H, W, 3) or (B, F, H, W, 3), not {shape}")
    array = np.array(media, object) if isinstance(media, list) else np.frombuffer(media, request.dtype)
    return Batch(
        media=array.reshape(shape),
        prompts=request.prompts,
        metadata=request.metadata,
        references=_unpacked_references(request),
    )


def pack_answer(scores: Scores) -> bytes:
    """Return the body of a response with scores."""
    notes = None if scores.notes is None else list(scores.notes)
    return pack({"scores": np.asarray(scores.values, "<f4").tobytes(), "notes": notes})


def unpack_answer(body: bytes, count: int) -> Scores:
    """Return the scores in a response; raise WireError if it has another number of scores or notes."""
    answer = _read(ScoreAnswer, body)
    if len(answer.scores) != 4 * count:
        raise WireError(f"{len(answer.scores)} bytes of scores for {count} samples")
    if answer.notes is not None and len(answer.notes) != count:
        raise WireError(f"{len(answer.notes)} remarks for {count} samples")
    return Scores(np.frombuffer(answer.scores, "<f4").astype(np.float32), answer.notes)


def identity(name: str, options: Mapping[str, Any]) -> str:
    """Return an identifier of a reward with its options."""
    return fingerprint([name, dict(options)])


def needs_fields(needs: Needs) -> dict[str, Any]:
    """Return the needs of a reward that concern clients, as plain data."""
    # Older versions have no field 'rate', so it is left out where not needed.
    left_out = {"watched_by"} | ({"rate"} if needs.rate is None else set())
    fields = {name: value for name, value in asdict(needs).items() if name not in left_out}
    # Earlier versions do not know 'samples', which are passed like images.
    media = "images" if needs.media == "samples" else needs.media
    return {**fields, "media": media, "columns": list(needs.columns)}


def needs_from(fields: Mapping[str, Any]) -> Needs:
    """Return needs from plain data; the device concerns the server alone."""
    return Needs(**{**fields, "columns": tuple(fields["columns"]), "accelerated": False})


def _read(message: type[M], body: bytes) -> M:
    try:
        return message.model_validate(unpack(body))
    except ValidationError as error:
        raise WireError(first_error(error)) from None
