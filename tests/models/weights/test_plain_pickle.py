"""Pickles of others: read as records, bounded in bytes, opcodes and depth, and obeyed in nothing."""

from __future__ import annotations

import collections
import pickle
import pickletools
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from configs.errors import ConfigError
from models.weights import plain_pickle
from models.weights.dcp_checkpoints import METADATA, DcpCheckpoint
from models.weights.plain_pickle import Record, read_records

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPES = {"net.a": torch.Size((4, 3)), "net.b": torch.Size((4,))}
PLAIN = {
    "text": "äöü" * 50,
    "long text": "x" * 300,
    "numbers": [0, 255, 256, 65535, 65536, -1, 2**31, -(2**40)],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "constants": [None, True, False],
    "nested": {"list": [[1, [2]], {"a": {"b": []}}]},
    "many": {str(number): number for number in range(3000)},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_content_is_read_as_pickle_reads_it(protocol: int) -> None:
    shared = ["one list, twice"]
    content = {**PLAIN, "twice": [shared, shared]}
    found = read_records(pickle.dumps(content, protocol), ())
    assert found == content
    assert found["twice"][0] is found["twice"][1]


def test_objects_are_records_of_their_names() -> None:
    name = "collections.OrderedDict"
    made = read_records(pickle.dumps(collections.OrderedDict(), 2), {name})
    assert (type(made), made.name, made.arguments) == (Record, name, ())
    with pytest.raises(ValueError, match=r"it names 'collections.OrderedDict'"):
        read_records(pickle.dumps(collections.OrderedDict(), 2), {"collections.orderedDict"})


class Called:
    """Pickled as a call of ``getattr``."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


@pytest.mark.parametrize("protocol", [2, 4])
def test_members_of_enums_are_records_of_their_classes_in_every_version_of_python(protocol: int) -> None:
    made = read_records(pickle.dumps(Called(collections.OrderedDict, "MEMBER"), protocol), {"collections.OrderedDict"})
    assert (made.name, made.arguments) == ("collections.OrderedDict", ("MEMBER",))
    for wrong in ((), (1,), ("text", "MEMBER"), (collections.OrderedDict, 1), (getattr, "MEMBER")):
        with pytest.raises(ValueError, match="cut off or damaged"):
            read_records(pickle.dumps(Called(*wrong), protocol), {"collections.OrderedDict"})


def nest() -> Any:
    """Return tuples whose text would be 2^17 brackets."""
    made: Any = ()
    for _ in range(17):
        made = (made, made)
    return made


BOMBS = {
    "a memo far away": b"Nr" + struct.pack("<I", 2**32 - 1) + b"\x93.",
    "a text longer than the file": b"X" + struct.pack("<I", 2**32 - 1) + b"x.",
    "a long text": b"X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20) + b".",
    "bytes longer than the file": b"\x8e" + struct.pack("<Q", 2**62) + b".",
    "a frame longer than the file": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"\x8e.",
    "an integer of many bytes": b"\x8b" + struct.pack("<i", 1 << 20) + b"\xff" * (1 << 20) + b".",
    "an integer of 255 bytes": b"\x8a\xff" + b"\xff" * 255 + b".",
    "digits": b"I" + b"9" * 100_000 + b"\n.",
    "a deep tuple": b"N" + b"\x85" * 1000 + b".",
    "doubled tuples": pickle.dumps(nest()),
    "many marks": b"(" * 100_000 + b".",
    "a deep list": b"]" * 100_000 + b"a" * 99_999 + b".",
    "keys that collide": b"}(" + b"".join(b"\x8a\x08" + bytes(7) + bytes([n, 78]) for n in range(99)) + b"u.",
    "a key that is a tuple": b"})Ns.",
    "a list that is called": b"])R.",
    "a list in the place of a name": b"]]\x93.",
    "a state of a list": b"]Nb.",
    "an append to a dict": b"}Na.",
    "an empty stack": b"a.",
    "no mark": b"Nt.",
    "an unknown memo": b"h\x07.",
    "an extension": b"\x82\x01.",
    "an instance": b"(i__builtin__\nexec\n.",
    "protocol 0": pickle.dumps(PLAIN["numbers"], 0),
    "no end": b"N" * 100,
    "nothing": b"",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_what_explodes_is_refused_at_once(data: bytes, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(data)
    begun = time.process_time()
    with pytest.raises(ConfigError, match=r"is not as torch\.distributed\.checkpoint writes it") as error:
        DcpCheckpoint(tmp_path)
    assert time.process_time() - begun < 2
    assert len(str(error.value)) < 1000


def test_bytes_and_opcodes_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(PLAIN)
    opcodes = sum(1 for _ in pickletools.genops(data))
    monkeypatch.setattr(plain_pickle, "MAX_OPCODES", opcodes)
    assert read_records(data, ()) == PLAIN
    monkeypatch.setattr(plain_pickle, "MAX_OPCODES", opcodes - 1)
    with pytest.raises(ValueError, match=f"it has more than {opcodes - 1} opcodes"):
        read_records(data, ())
    monkeypatch.setattr(plain_pickle, "MAX_BYTES", len(data) - 1)
    with pytest.raises(ValueError, match=f"it has {len(data)} bytes, and {len(data) - 1} are read at most"):
        read_records(data, ())


def read_or_said(folder: Path) -> dict[str, torch.Tensor] | str:
    try:
        return DcpCheckpoint(folder).read(SHAPES)
    except ConfigError as error:
        return str(error)


def test_damaged_checkpoints_are_refused_or_read_as_they_were_saved(tmp_path: Path) -> None:
    saved = {"a": torch.arange(1.0, 13).reshape(4, 3), "b": torch.arange(1.0, 5)}
    dcp.save({"model": {"net": saved}}, checkpoint_id=tmp_path)
    draw = random.Random(0)
    right = refused = 0
    for path in (tmp_path / METADATA, tmp_path / "__0_0.distcp"):
        whole = path.read_bytes()
        for _ in range(400):
            damaged = bytearray(whole)
            for _ in range(draw.randint(1, 3)):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            path.write_bytes(damaged[: draw.choice([len(damaged), len(damaged), draw.randrange(len(damaged))])])
            found = read_or_said(tmp_path)
            if isinstance(found, str):
                assert len(found) < 1000
                refused += 1
                continue
            # Numbers are part of an archive with checksums, so what is accepted is what was saved.
            assert all(torch.equal(found[f"net.{name}"], value) for name, value in saved.items())
            right += 1
        path.write_bytes(whole)
    assert refused > 400
    assert right > 50
