"""Bodies of requests and answers: msgpack, never pickle, within bounds and with a checksum."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import xxhash

from flowmill.configs.gc_tuning import without_collecting

TYPE = "application/msgpack"
CHECKSUM = "x-flowmill-xxh3"
#: Maximum rows of a message. Legitimate requests stay below all bounds.
MOST_ROWS = 1 << 16
#: Maximum keys of a mapping, and values in a message.
_MOST_KEYS, _MOST_VALUES = 1 << 12, 1 << 21


class WireError(ValueError):
    """Bytes that violate the protocol."""


def checksum(body: bytes) -> str:
    """Return the checksum of a body, for its header."""
    return xxhash.xxh3_128_hexdigest(body)


def pack(message: Any) -> bytes:
    """Return msgpack of plain data; raise WireError if it has no form for a value, as for integers beyond 64 bits."""
    try:
        return msgpack.packb(message, use_bin_type=True)
    except (OverflowError, ValueError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from None


def unpack(body: bytes) -> Any:
    """Return the content of a body; raise WireError if it is not msgpack, or holds too much. Values are counted during
    parsing, as a byte may become a large object."""
    values = 0

    def count(inner: Any) -> Any:
        nonlocal values
        values += 1 + len(inner)
        if values > _MOST_VALUES:
            raise WireError(f"more than {_MOST_VALUES} values in one message")
        return inner

    try:
        # Collections among millions of new lists take ten times as long as their parsing.
        with without_collecting():
            return msgpack.unpackb(
                body,
                raw=False,
                strict_map_key=True,
                max_array_len=MOST_ROWS,
                max_map_len=_MOST_KEYS,
                list_hook=count,
                object_hook=count,
            )
    except WireError:
        raise
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not msgpack: {str(error)[:200]}") from None
