"""Pickles read as plain records: texts, integers, tuples, lists, dicts, and names with their call arguments.

Names in a pickle are never imported, called or instantiated. Work and memory are linear in the bytes read: the number
of opcodes, the depth of tuples and the stack, and the length of integers and texts are bounded, and keys are texts or
records. The supported opcodes are those that ``pickle`` writes for such content with protocols 2 to 5 (``pickletools``
describes each).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

#: Bounds. A chunk of a checkpoint takes about 70 opcodes and 140 bytes.
MAX_BYTES, MAX_OPCODES = 1 << 27, 1 << 25
MAX_STACK, MAX_DEPTH, MAX_TEXT, MAX_INTEGER_BYTES = 1 << 14, 16, 1 << 12, 8


@dataclass(slots=True, eq=False)
class Record:
    """A pickle's description of an object: the name of its class or function, the arguments and the state."""

    name: str
    """``module.name``."""
    arguments: Any = ()
    """Arguments of the class or function."""
    state: Any = None
    """State that is set afterwards."""


#: Function by which Python 3.11.2 writes members of an enum: of a class and a name it makes a record of that class.
_MEMBER = frozenset({"builtins.getattr", "__builtin__.getattr"})
#: Name of records for ids that ``Pickler.persistent_id`` wrote; the arguments are the id.
PERSISTENT = "persistent_id"


def read_records(data: bytes, names: Collection[str]) -> Any:
    """Return the content of a pickle. Raises ValueError if it has another name or other opcodes, or exceeds a bound;
    the message is short. ``names``: every allowed ``module.name``."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes, and {MAX_BYTES} are read at most")
    machine = _Machine(data, names)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, AttributeError, struct.error, UnicodeDecodeError):
        raise ValueError(f"it is cut off or damaged at byte {machine.position}") from None


class _Machine:
    """The stack machine of pickles, for the opcodes of plain records."""

    def __init__(self, data: bytes, names: Collection[str]) -> None:
        self._data, self._names = data, names
        self.position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._depths: dict[int, int] = {}

    def run(self) -> Any:
        data, handlers, stack = self._data, _HANDLERS, self._stack
        for _ in range(MAX_OPCODES):
            code = data[self.position]
            self.position += 1
            if code == _STOP:
                return stack.pop()
            handler = handlers.get(code)
            if handler is None:
                raise ValueError(f"it holds more than plain records: opcode {code:#04x} at byte {self.position - 1}")
            handler(self)
            if len(stack) > MAX_STACK:
                raise ValueError(f"it is nested too deeply, or a collection is written as one, at byte {self.position}")
        raise ValueError(f"it has more than {MAX_OPCODES} opcodes")

    def _take(self, count: int) -> bytes:
        found = self._data[self.position : self.position + count]
        if len(found) != count:
            raise ValueError(f"it is cut off at byte {self.position}")
        self.position += count
        return found

    def _number(self, layout: struct.Struct) -> int:
        return int(layout.unpack(self._take(layout.size))[0])

    def _skip(self, count: int) -> None:
        self._take(count)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _integer(self) -> None:
        size = self._number(_BYTE)
        if size > MAX_INTEGER_BYTES:
            raise ValueError(f"it holds an integer of {size} bytes")
        self._push(int.from_bytes(self._take(size), "little", signed=True))

    def _text(self, layout: struct.Struct) -> None:
        size = self._number(layout)
        if size > MAX_TEXT:
            raise ValueError(f"it holds a text of {size} bytes")
        self._push(self._take(size).decode())

    def _mark(self) -> None:
        self._marks.append(len(self._stack))
        if len(self._marks) > MAX_STACK:
            raise ValueError("it is nested too deeply")

    def _since_mark(self) -> list[Any]:
        at = self._marks.pop()
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def _tuple(self, count: int | None) -> None:
        values = self._since_mark() if count is None else [self._stack.pop() for _ in range(count)][::-1]
        depth = 1 + max((self._depths.get(id(value), 0) for value in values if type(value) is tuple), default=0)
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        made = tuple(values)
        self._depths[id(made)] = depth
        self._push(made)

    def _put(self, layout: struct.Struct | None) -> None:
        # A dict, so that a large index takes no extra memory.
        self._memo[len(self._memo) if layout is None else self._number(layout)] = self._stack[-1]

    def _get(self, layout: struct.Struct) -> None:
        self._push(self._memo[self._number(layout)])

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise TypeError
        for key, value in zip(values[::2], values[1::2], strict=False):
            # Integers can be chosen to collide, and tuples are slow to compare.
            if type(key) not in (str, Record):
                raise ValueError(f"it has a key of type {type(key).__name__}")
            target[key] = value

    def _name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in self._names and full not in _MEMBER:
            raise ValueError(f"it names {full[:100]!r}")
        self._push(Record(full))

    def _line(self) -> str:
        end = self._data.find(b"\n", self.position, self.position + MAX_TEXT)
        if end < 0:
            raise ValueError(f"it is cut off at byte {self.position}")
        found = self._data[self.position : end].decode()
        self.position = end + 1
        return found

    def _global(self) -> None:
        self._name(self._line(), self._line())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError
        self._name(module, name)

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple or type(function) is not Record:
            raise TypeError
        if function.name in _MEMBER:
            function, arguments = arguments[0], arguments[1:]
            if type(function) is not Record or function.name in _MEMBER or [type(each) for each in arguments] != [str]:
                raise TypeError
        self._push(Record(function.name, arguments))

    def _build(self) -> None:
        state = self._stack.pop()
        if type(self._stack[-1]) is not Record:
            raise TypeError
        self._stack[-1].state = state

    def _persistent(self) -> None:
        self._push(Record(PERSISTENT, self._stack.pop()))


_BYTE, _SHORT, _INT, _UINT = (struct.Struct(f"<{kind}") for kind in "BHiI")
_STOP = ord(".")
_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda m: m._skip(1),  # PROTO
    0x95: lambda m: m._skip(8),  # FRAME
    ord("("): lambda m: m._mark(),
    ord("N"): lambda m: m._push(None),
    0x88: lambda m: m._push(True),
    0x89: lambda m: m._push(False),
    ord(")"): lambda m: m._push(()),
    ord("]"): lambda m: m._push([]),
    ord("}"): lambda m: m._push({}),
    ord("K"): lambda m: m._push(m._number(_BYTE)),
    ord("M"): lambda m: m._push(m._number(_SHORT)),
    ord("J"): lambda m: m._push(m._number(_INT)),
    0x8A: lambda m: m._integer(),
    0x8C: lambda m: m._text(_BYTE),
    ord("X"): lambda m: m._text(_UINT),
    ord("h"): lambda m: m._get(_BYTE),
    ord("j"): lambda m: m._get(_UINT),
    ord("q"): lambda m: m._put(_BYTE),
    ord("r"): lambda m: m._put(_UINT),
    0x94: lambda m: m._put(None),
    ord("t"): lambda m: m._tuple(None),
    0x85: lambda m: m._tuple(1),
    0x86: lambda m: m._tuple(2),
    0x87: lambda m: m._tuple(3),
    ord("a"): lambda m: m._append([m._stack.pop()]),
    ord("e"): lambda m: m._append(m._since_mark()),
    ord("s"): lambda m: m._set([m._stack.pop(), m._stack.pop()][::-1]),
    ord("u"): lambda m: m._set(m._since_mark()),
    ord("c"): lambda m: m._global(),
    0x93: lambda m: m._stack_global(),
    0x81: lambda m: m._call(),  # NEWOBJ
    ord("R"): lambda m: m._call(),  # REDUCE
    ord("b"): lambda m: m._build(),
    ord("Q"): lambda m: m._persistent(),
}
