"""Small JSON objects with an embedded checksum, so that any flipped bit is detected."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import xxhash

from flowmill.configs.errors import CorruptError

#: Keys that sealing adds; one without the other indicates damage.
_CHECKSUM, _FORMAT = "checksum", "format"
_VERSION = 1
REMEDY = "'flowmill store repair' sets it aside; the same command as before then writes it again."


def seal(data: Mapping[str, Any], *, finite: bool = False) -> bytes:
    """Return an object as JSON with its checksum; equal objects give equal bytes.

    Args:
        data: the object.
        finite: refuse numbers that are not finite.

    Raises:
        ValueError: ``finite`` is set and a number is not finite.
    """
    named = {**data, _FORMAT: _VERSION}
    return _written({**named, _CHECKSUM: _hash(_written(named))}, finite=finite)


def unseal(data: bytes, where: str, before: Collection[str] = ()) -> dict[str, Any]:
    """Return a sealed object, or one written before checksums were introduced.

    Args:
        data: the stored bytes.
        where: their path.
        before: keys of such an object in versions without checksums; none if those did not write it.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CorruptError(f"{where} is not JSON as it was committed: the file was damaged. {REMEDY}")
    checksum = value.pop(_CHECKSUM, None)
    if checksum is None and _FORMAT not in value:
        if before and value.keys() >= set(before):
            return value
        raise CorruptError(f"{where} lacks the checksum that it was written with: the file was damaged. {REMEDY}")
    if isinstance(value.get(_FORMAT), int) and value[_FORMAT] > _VERSION:
        raise CorruptError(
            f"{where} has format {value[_FORMAT]}; this version reads up to {_VERSION}. Upgrade flowmill; if no newer "
            "one wrote to the store, 'flowmill store repair' sets the record aside."
        )
    # Damage to one of the two keys leaves the other. The raw bytes are compared first, to avoid encoding again.
    line = f' "{_CHECKSUM}": "{checksum}",\n'.encode()
    if checksum != _hash(data.replace(line, b"", 1)) and checksum != _hash(_written(value)):
        raise CorruptError(f"{where} does not match its own checksum: the file was damaged. {REMEDY}")
    del value[_FORMAT]
    return value


def _hash(text: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(text)


def _written(data: Mapping[str, Any], *, finite: bool = False) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True, allow_nan=not finite) + "\n").encode()
