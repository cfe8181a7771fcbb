"""Small JSON objects that carry a checksum of themselves, so that any flipped bit is detected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from configs.errors import CorruptError

#: Keys that sealing adds: either of them without the other says that something was damaged.
_CHECKSUM, _FORMAT = "checksum", "format"
_VERSION = 1
_REMEDY = "'flowmill store repair' sets it aside; the same command as before then writes it again."


def seal(data: Mapping[str, Any], *, finite: bool = False) -> bytes:
    """Return an object as JSON with a checksum of it; equal ones give equal bytes.

    Args:
        data: the object.
        finite: every number must be.

    Raises:
        ValueError: it holds a number that is not finite, and must not.
    """
    named = {**data, _FORMAT: _VERSION}
    return _written({**named, _CHECKSUM: _hash(_written(named))}, finite=finite)


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Return the object that was sealed, or one that was written before there were checksums.

    Raises:
        CorruptError: it differs from its checksum.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CorruptError(f"{where} is not JSON as it was committed: the file was damaged. {_REMEDY}")
    checksum = value.pop(_CHECKSUM, None)
    if checksum is None and _FORMAT not in value:
        return value
    if isinstance(value.get(_FORMAT), int) and value[_FORMAT] > _VERSION:
        raise CorruptError(
            f"{where} has format {value[_FORMAT]}; this flowmill reads up to {_VERSION}. Upgrade flowmill; if no newer "
            "one wrote to the store, 'flowmill store repair' sets the record aside."
        )
    # Damage to one of the two keys leaves the other. As it was written, it needs not be written again to be compared.
    line = f' "{_CHECKSUM}": "{checksum}",\n'.encode()
    if checksum != _hash(data.replace(line, b"", 1)) and checksum != _hash(_written(value)):
        raise CorruptError(f"{where} does not match its own checksum: the file was damaged. {_REMEDY}")
    del value[_FORMAT]
    return value


def _hash(text: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(text)


def _written(data: Mapping[str, Any], *, finite: bool = False) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True, allow_nan=not finite) + "\n").encode()
