"""Canonical JSON and its hashes, which define "the same work"."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

#: Made once: a list of prompts is a million small values.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


def canonical_json(value: Json) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, finite floats in shortest form.

    Raises:
        ValueError: the value holds a NaN or an infinity, which have no JSON form.
    """
    return _ENCODER.encode(_normalize(value))


def fingerprint(value: Json) -> str:
    """Return the 32 hex digits that name the work described by ``value`` (blake2b, 128 bits)."""
    return hash_text(canonical_json(value))


def hash_text(text: str) -> str:
    """Return the 32 hex digits that name a text (blake2b, 128 bits); of a canonical JSON text, its fingerprint."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _normalize(value: Json) -> Json:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    # Types before abstract ones: a list of rows has millions of small values.
    if isinstance(value, list):
        return [_normalize(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _normalize(item) for key, item in value.items()}
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} has no JSON form and cannot be part of a fingerprint")
        # 1.0 and 1 are the same setting, however it is written in YAML.
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(key): _normalize(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_normalize(item) for item in value]
    return value
