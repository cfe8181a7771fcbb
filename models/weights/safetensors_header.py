"""Canonical headers of safetensors files: equal content gives equal bytes."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

from flowmill.configs.errors import CorruptError

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


def canonical_header(path: Path) -> None:
    """Rewrite a safetensors file with its header's keys sorted.

    The header is JSON (https://huggingface.co/docs/safetensors: 8 bytes of length, JSON, tensors at offsets counted
    from its end); safetensors writes its metadata in an order that differs between calls. Raises CorruptError if the
    file is no safetensors file.
    """
    with path.open("r+b") as file:
        stored = file.read(_read_length(file.read(_LENGTH.size), path))
        header = _canonical(stored)
        if len(header) == len(stored):
            # The usual case: only the order differs, and the tensors stay in place.
            file.seek(_LENGTH.size)
            file.write(header)
            return
        rewritten = path.with_suffix(".rewritten")
        with rewritten.open("wb") as target:
            target.write(_LENGTH.pack(len(header)) + header)
            shutil.copyfileobj(file, target, 1 << 20)
    os.replace(rewritten, path)


def _read_length(data: bytes, path: Path) -> int:
    if len(data) != _LENGTH.size or _LENGTH.unpack(data)[0] > path.stat().st_size:
        raise CorruptError(f"'{path.name}' is no safetensors file: its header is cut off. Export the policy again.")
    return int(_LENGTH.unpack(data)[0])


def _canonical(header: bytes) -> bytes:
    text = json.dumps(json.loads(header), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    # Tensors stay aligned, as readers map them into memory.
    return text + b" " * (-len(text) % _ALIGNMENT)
