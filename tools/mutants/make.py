"""Makes mutants of a source file: the same text with one operator, sign, constant, condition or bound changed.

The source is edited in place at the positions that ``ast`` gives, so that a mutant's diff is one line. Left alone are
annotations, decorators, class headers, formatted strings (messages) and ``strict=`` of zip.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

ARITHMETIC: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
COMPARISONS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
EXTREMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One edit of one file."""

    path: str
    """File, relative to the root of the tree."""
    start: int
    """First byte that is replaced."""
    stop: int
    """Byte after the last one that is replaced."""
    text: str
    """What is put there."""

    def apply(self, source: bytes) -> bytes:
        """Return the mutated source."""
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def change(self, source: bytes) -> tuple[str, str]:
        """Return the changed lines before and after, without indentation."""
        first, last = source.rfind(b"\n", 0, self.start) + 1, source.find(b"\n", self.stop)
        before, after = source[first:last], self.apply(source)[first : last + len(self.text) - (self.stop - self.start)]
        return before.decode().strip(), after.decode().strip()

    def diff(self, source: bytes) -> str:
        """Return a unified diff without context."""
        both = (text.decode().splitlines() for text in (source, self.apply(source)))
        return "\n".join(difflib.unified_diff(*both, self.path, self.path, lineterm="", n=0))


def mutants(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file, in the order of their place."""
    maker = _Maker(path, source)
    tree = ast.parse(source)
    found = {(m.start, m.stop, m.text): m for node in _mutable(tree) for m in maker.of(node)}
    return [found[key] for key in sorted(found)]


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may be changed."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            left_alone = isinstance(child, ast.JoinedStr) or (isinstance(child, ast.keyword) and child.arg == "strict")
            if isinstance(child, ast.AST) and not left_alone:
                yield from _mutable(child)


class _Maker:
    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source
        lines = source.splitlines(keepends=True)
        self._starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]

    def of(self, node: ast.AST) -> Iterator[Mutant]:
        """Yield the mutants of one node, not of its children."""
        if isinstance(node, ast.BinOp | ast.AugAssign):
            yield from self._arithmetic(node)
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in pairwise(node.values):
                yield from self._between(left, right, word, [other])
        elif isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                word, others = COMPARISONS[type(op)]
                yield from self._between(left, right, word, others)
        elif isinstance(node, ast.UnaryOp):
            yield self._edit(self._start(node), self._start(node.operand), self._unsigned(node))
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        else:
            yield from self._conditions(node)

    def _conditions(self, node: ast.AST) -> Iterator[Mutant]:
        """Yield the inverted condition; one with an operator of its own has that changed instead."""
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
        tests += node.ifs if isinstance(node, ast.comprehension) else []
        for test in tests:
            if not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp):
                yield self._edit(self._start(test), self._end(test), f"(not {self._text(test)})")

    def _arithmetic(self, node: ast.BinOp | ast.AugAssign) -> Iterator[Mutant]:
        left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
        if type(node.op) in ARITHMETIC:
            word, other = ARITHMETIC[type(node.op)]
            yield from self._between(left, right, word, [other])

    def _between(self, left: ast.expr, right: ast.expr, word: str, others: Sequence[str]) -> Iterator[Mutant]:
        """Yield mutants of the operator that stands between two expressions."""
        start, stop = self._end(left), self._start(right)
        gap = self._source[start:stop].decode()
        place = re.search(re.escape(word), gap)
        if place is None:
            raise ValueError(f"{self._path}: no '{word}' between {start} and {stop}: {gap!r}")
        for other in others:
            yield self._edit(start + place.start(), start + place.end(), other)

    def _unsigned(self, node: ast.UnaryOp) -> str:
        """Return what stands between a unary operator and its operand, without the operator."""
        gap = self._source[self._start(node) : self._start(node.operand)].decode()
        return re.sub(r"^(not\s*|[-~+])", "", gap)

    def _constant(self, node: ast.Constant) -> Iterator[Mutant]:
        value = node.value
        others: list[object] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [value + 1, value - 1]
        elif isinstance(value, float):
            others = [2 * value, -value] if value else [1.0]
        elif isinstance(value, str) and value in ("amin", "amax"):
            others = [EXTREMES[value]]
        for other in others:
            text = f"({other!r})" if isinstance(other, int | float) and other < 0 else repr(other)
            yield self._edit(self._start(node), self._end(node), text)

    def _call(self, node: ast.Call) -> Iterator[Mutant]:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else self._text(function)
        if name in EXTREMES:
            stop = self._end(node.func)
            yield self._edit(stop - len(name), stop, EXTREMES[name])
        if name == "range":
            bound = node.args[0] if len(node.args) == 1 else node.args[1]
            for change in ("+ 1", "- 1"):
                yield self._edit(self._start(bound), self._end(bound), f"({self._text(bound)}) {change}")
        if name == "clamp" and len(node.args) == 2:
            low, high = (self._text(argument) for argument in node.args)
            yield self._edit(self._start(node.args[0]), self._end(node.args[1]), f"{high}, {low}")
        for keyword in node.keywords if name == "clamp" else ():
            start = self._start(keyword)
            if keyword.arg in EXTREMES:
                yield self._edit(start, start + len(keyword.arg), EXTREMES[keyword.arg])

    def _edit(self, start: int, stop: int, text: str) -> Mutant:
        return Mutant(path=self._path, start=start, stop=stop, text=text)

    def _start(self, node: ast.expr | ast.keyword) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._source[self._start(node) : self._end(node)].decode()
