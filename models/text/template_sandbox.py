"""A sandbox for third-party templates: the environment of transformers, with limits of steps and sizes.

It has no randomness, a clock set by the caller, and refuses output that differs between processes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, wraps
from types import GeneratorType, MethodType
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from jinja2.parser import Parser

#: Maximum characters of a template; the longest published ones have about 20,000.
_MOST_SOURCE = 1 << 18
#: Maximum characters of a chat.
_MOST_OUTPUT = 1 << 24
#: Maximum loop iterations and calls.
_MOST_STEPS = 1_000_000
#: Maximum product of the sizes of a call's arguments, about the size of its result, and maximum sum over all calls.
_MOST_WEIGHT, _MOST_MADE = 50_000_000, 1_000_000_000
#: Maximum values in a list or a mapping, nested ones included.
_MOST_VALUES = 1_000_000
_SECONDS = 10.0
#: Large widths in format strings.
_WIDE = re.compile(r"\d{5}")


@dataclass(kw_only=True)
class _Budget:
    """The resources of one rendering, and its clock."""

    now: datetime
    settled: bool
    dates: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    made: int = 0
    ends: float = field(default_factory=lambda: time.monotonic() + _SECONDS)

    def take(self, steps: int, made: int = 0) -> None:
        """Count steps and the characters or values they make; raise SecurityError above a limit."""
        self.steps, self.made = self.steps + steps, self.made + made
        if self.made > _MOST_MADE:
            raise SecurityError(f"it makes more than {_MOST_MADE:,} characters on its way")
        if self.steps > _MOST_STEPS or time.monotonic() > self.ends:
            raise SecurityError(f"it takes more than {_MOST_STEPS:,} steps or {_SECONDS:g} seconds")


_BUDGET: ContextVar[_Budget] = ContextVar("budget")


def carried_out(
    template: Template, given: Mapping[str, Any], now: datetime, *, settled: bool
) -> tuple[str, dict[str, str]]:
    """Return the text of a template, and the dates it read from the clock, by their format. Raises ChoiceError if it
    compares the date, and is not settled; TemplateError if the template fails, or exceeds a limit. ``settled``: the
    template may compare the date; otherwise only write it."""
    budget = _Budget(now=now, settled=settled)
    token = _BUDGET.set(budget)
    try:
        return template.render(**given), budget.dates
    except (RecursionError, MemoryError, OverflowError) as error:
        raise TemplateError(f"it takes too much: {type(error).__name__} {error}") from None
    finally:
        _BUDGET.reset(token)


@lru_cache(maxsize=32)
def compiled(text: str) -> Template:
    """Return a compiled template; raise TemplateError if it is too long, or has a syntax error."""
    if len(text) > _MOST_SOURCE:
        raise TemplateError(f"it has {len(text):,} characters, more than {_MOST_SOURCE:,}")
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_shown
    )
    parsed = _Counting().visit(environment.parse(text))
    return Template.from_code(environment, environment.compile(parsed), environment.make_globals(None))


class ChoiceError(Exception):
    """A template compares the clock with something."""


class _Unsettled(str):
    """A date where none is set: renderings at two times detect that it is written, and comparing it is an error."""

    __slots__ = ()

    def _choose(self, other: object) -> bool:
        raise ChoiceError

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _choose  # type: ignore[assignment]
    __hash__ = str.__hash__


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of templates; the size of every call, filter and product is checked before it runs."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _weighed_filter(each) for name, each in self.filters.items()}
        self.filters["format"] = _format
        self.filters |= {"tojson": _weighed_filter(_tojson), "random": _refused("random"), _COUNTED: _counted}
        self.filters[_JOINED] = _joined
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime, "lipsum": _refused("lipsum")}

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps 'format'.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str) and getattr(__obj, "__name__", "") in ("format", "format_map"):
            _check_widths(owner)
            _weigh([owner, *map(_as_written, args), *map(_as_written, kwargs.values())])
        else:
            _weigh([owner if isinstance(owner, str | list | tuple | dict) else None, *args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
            _weigh([left, _as_written(right)])
            return super().call_binop(context, operator, left, right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            if max(abs(left), abs(right)) > (1 << 64 if operator != "**" else 64):
                raise SecurityError("it computes with numbers that are too large")
        else:
            _weigh([left, right])
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # type: ignore[override]
        return _joined(parts)


class _Generation(Extension):
    """The tag around an assistant's message, from which trainers derive masks."""

    tags = {"generation"}  # noqa: RUF012 - as the base

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_COUNTED, _JOINED = "counted_passes", "joined_texts"


class _Counting(NodeTransformer):
    """Counts the iterations of loops, and limits the results of ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        listed = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(listed, _JOINED, [], [], None, None, lineno=node.lineno)


def _counted(values: Any) -> Any:
    if not hasattr(values, "__len__"):
        values = tuple(values)
    _BUDGET.get().take(1 + len(values))
    return values


def _joined(parts: Iterable[Any]) -> str:
    """Join texts; raise SecurityError if the result is too long."""
    found, length = [], 0
    for part in parts:
        found.append(part if isinstance(part, str) else str(_shown(part)))
        length += len(found[-1])
        if length > _MOST_OUTPUT:
            raise SecurityError(f"it writes more than {_MOST_OUTPUT:,} characters")
    budget = _BUDGET.get(None)
    if budget is not None:
        budget.take(1, length)
    return "".join(found)


def _weighed_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def weighed(*args: Any, **kwargs: Any) -> Any:
        _weigh([*args, *kwargs.values()])
        return function(*args, **kwargs)

    return weighed


def _weigh(values: Sequence[Any]) -> None:
    """Count a call, and raise SecurityError if its result may be huge."""
    weight = 1
    # Numbers alone make no text; with a text or a list they may repeat it.
    alone = all(value is None or isinstance(value, int | float) for value in values)
    for value in () if alone else values:
        weight *= max(1, _size(value))
        if weight > _MOST_WEIGHT:
            raise SecurityError("a call of it would make too much text")
    # Constants are computed while a template is compiled, without a budget.
    budget = _BUDGET.get(None)
    if budget is not None:
        budget.take(1, weight)


def _size(value: Any) -> int:
    """Return a number's magnitude, a text's length, or the sum of that over the values of a list or a mapping; raise
    SecurityError if it has too many values, as lists that contain each other twice do."""
    if isinstance(value, int):
        return abs(value)
    found, left, count = 0, [value], 0
    while left:
        each = left.pop()
        count += 1
        if count > _MOST_VALUES:
            raise SecurityError(f"it makes a list of more than {_MOST_VALUES:,} values")
        if isinstance(each, list | tuple | dict):
            left += [*each, *each.values()] if isinstance(each, dict) else each
        found += len(each) if isinstance(each, str | bytes) else 1
    return found


def _as_written(value: Any) -> Any:
    """Return a number as text, since it is written and not used as a length."""
    return str(value) if isinstance(value, int | float) else value


def _check_widths(form: str) -> None:
    if _WIDE.search(form) or "*" in form:
        raise SecurityError("it formats text with a width of more than four digits, or one that is computed")


def _format(form: Any, *args: Any, **kwargs: Any) -> str:
    _check_widths(str(form))
    _weigh([form, *map(_as_written, args), *map(_as_written, kwargs.values())])
    return do_format(form, *args, **kwargs)


def _shown(value: Any) -> Any:
    """Return a value to write; refuse one that Python writes with its address."""
    if isinstance(value, GeneratorType | MethodType | type) or (callable(value) and not isinstance(value, Undefined)):
        raise SecurityError(f"it writes a {type(value).__name__}, which is another text in every process")
    if isinstance(value, list | tuple | dict):
        _size(value)
    return value


def _strftime(form: str) -> str:
    budget = _BUDGET.get()
    found = budget.dates.setdefault(form, budget.now.strftime(form))
    return found if budget.settled else _Unsettled(found)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _refused(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise SecurityError(f"it draws lots ({name}), so the same config would give other texts")

    return refused


def _tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """Return JSON as transformers writes it: HTML characters are not escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)
