"""The source of a user's function or class, with all that it uses, so that other processes can define it again."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import linecache
import math
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import hash_text
from flowmill.source_names import FUTURE, global_names, in_order, inherited_names, submodules, types_of_options

#: Most characters of a constant.
_MOST = 1 << 16
_READERS_OF_TYPES = ("pydantic", "TypeAdapter", "get_type_hints")
_Typed: TypeAlias = Callable[[Any], bool]
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_importable(thing: Any) -> bool:
    """Return whether other processes can import a function or class: it is not of a script or notebook."""
    home = str(thing.__module__)
    has_file = getattr(sys.modules.get(home), "__file__", None) is not None
    return home != "__main__" and (has_file or home.partition(".")[0] in sys.stdlib_module_names)


def user_folders(modules: Iterable[str]) -> list[str]:
    """Return the folders from which a user's own modules are imported: of those that are not installed."""
    installed = [*map(Path, sysconfig.get_paths().values())]
    tops = dict.fromkeys(name.partition(".")[0] for name in modules)
    places = [place for top in tops if top != "flowmill" for place in _places(top)]
    own = (each for each in places if not any(each.is_relative_to(folder) for folder in installed))
    return list(dict.fromkeys(str(each.parent.resolve()) for each in own))


def _places(top: str) -> list[Path]:
    """Return the file of a module, or the folders of a package; one without ``__init__.py`` may have several."""
    module = sys.modules.get(top)
    # A function may import a module when it is called.
    spec = find_spec(top) if module is None else getattr(module, "__spec__", None)
    if spec is not None and spec.submodule_search_locations is not None:
        return [*map(Path, spec.submodule_search_locations)]
    file = getattr(module, "__file__", None) or (spec.origin if spec is not None and spec.has_location else None)
    return [] if file is None else [Path(file)]


def imported_modules(source: str) -> list[str]:
    """Return the names of the modules that a source imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return [*names, *(str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level)]


def carried_source(thing: Any) -> str:
    """Return source that defines a function or class, after the imports, constants and definitions it uses.

    It is equal in all processes, but for imports of submodules.

    Raises:
        ConfigError: it uses something that source cannot carry, such as a loaded model.
    """
    lines = _lines(thing, lambda each: each is thing or inspect.isclass(each))
    return _joined([*submodules(lines), *in_order(lines)])


def module_name(thing: Any) -> str:
    """Return the name of the module that holds the carried source of a function or class: the same for equal work.

    Types of options and submodules do not count: they change no work, and sources of earlier versions had none.
    """
    lines = _lines(thing, lambda each: False)
    # Work with pydantic and such functions depends on types of all its classes. Other lines keep their order.
    reads_types = any(word in line for line in lines.values() for word in _READERS_OF_TYPES)
    classes = _lines(thing, lambda each: reads_types and inspect.isclass(each) and each is not thing)
    lines |= classes | _lines(thing, lambda each: hasattr(each, "__pydantic_complete__"))
    return f"{thing.__name__}_{hash_text(_joined(in_order(lines)))}"


def _lines(thing: Any, typed: _Typed) -> dict[str, str]:
    """Return by name what defines a function or class and all that it uses; ``typed``: whether the types of the options
    of a definition are carried."""
    lines: dict[str, str] = {}
    _define(thing, thing.__name__, lines, label=f"reward '{thing.__name__}'", typed=typed)
    return lines


def _joined(parts: Iterable[str]) -> str:
    # Annotations may have names that cannot be carried, or that only type checkers import.
    return "\n".join([FUTURE, *parts]) + "\n"


def _define(thing: Any, name: str, lines: dict[str, str], *, label: str, typed: _Typed) -> None:
    """Append the definition of a function or class, after all that it uses."""
    if thing.__name__ != name or "<" in name:
        raise ConfigError(f"{label}: '{thing.__name__}' has no name of its own. Define it with def or class.")
    closed = getattr(getattr(thing, "__code__", None), "co_freevars", ())
    if closed:
        raise ConfigError(
            f"{label} uses {', '.join(closed)} of the function around it, which other processes lack. Define it at the "
            "top of the script or cell, and pass values as options."
        )
    try:
        source = _at_the_margin(_class_source(thing) or inspect.getsource(thing))
    except (OSError, TypeError, SyntaxError):
        raise ConfigError(
            f"{label}: the source of '{name}' cannot be read. Define it in a file, or as a function in a notebook cell."
        ) from None
    # Functions may use each other.
    lines[name] = source.rstrip("\n")
    known = vars(sys.modules[thing.__module__])
    needed = global_names(source)
    for used in [*needed, *inherited_names(source)]:
        if used in lines:
            continue
        if used in known:
            _carry(used, known[used], lines, label=label, typed=typed)
        elif used in needed and not hasattr(builtins, used):
            raise ConfigError(f"{label} uses '{used}', which is not defined.")
    for used in types_of_options(source) if typed(thing) else ():
        _carry_type(used, known, lines, label=label, typed=typed)
    # After the definitions that it uses.
    lines[name] = lines.pop(name)


def _at_the_margin(source: str) -> str:
    """Return the source of a definition that is indented as one that is not, with its texts of several lines as they
    are."""
    whole, moved = (f"if True:\n{source}" if source[:1].isspace() else source), textwrap.dedent(source)
    content = _content(whole)
    with contextlib.suppress(SyntaxError):
        return moved if _content(moved) == content else whole
    return whole


def _content(source: str) -> str:
    """Return the definition in a source as text, without its docstrings."""
    definition = next((node for node in ast.walk(ast.parse(source)) if isinstance(node, _DEFINED)), ast.Pass())
    for each in ast.walk(definition):
        if isinstance(each, _DEFINED) and ast.get_docstring(each) is not None:
            each.body[0] = ast.Pass()
    return ast.dump(definition)


def _class_source(thing: Any) -> str:
    """Return the source of a class by the place of a method: ``inspect`` finds no classes of notebook cells."""
    code = next((each.__code__ for each in vars(thing).values() if inspect.isfunction(each)), None)
    if not inspect.isclass(thing) or code is None:
        return ""
    lines = linecache.getlines(code.co_filename)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.ClassDef) and node.name == thing.__name__ and node.end_lineno is not None:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first <= code.co_firstlineno <= node.end_lineno:
                return "".join(lines[first - 1 : node.end_lineno])
    return ""


def _carry(name: str, value: Any, lines: dict[str, str], *, label: str, typed: _Typed) -> None:
    """Append the line that gives a global name its value."""
    literal = None if isinstance(value, ModuleType) else _literal(value)
    home, own_name = getattr(value, "__module__", None), getattr(value, "__name__", "")
    if isinstance(value, ModuleType):
        lines[name] = f"import {value.__name__} as {name}"
    elif literal is not None and len(literal) <= _MOST:
        lines[name] = f"{name} = {literal}"
    elif callable(value) and home and getattr(sys.modules.get(home), own_name, None) is value:
        if home == "__main__" or not (is_importable(value) or inspect.isbuiltin(value)):
            _define(value, name, lines, label=label, typed=typed)
        else:
            lines[name] = f"from {home} import {own_name} as {name}"
    else:
        raise ConfigError(
            f"{label} uses the global '{name}', of type {type(value).__name__}, which other processes lack. Make it "
            "inside: write a class whose __init__ loads it, with a method score(self, media, prompts, metadata)."
        )


def _carry_type(
    name: str,
    known: Mapping[str, Any],
    lines: dict[str, str],
    *,
    label: str,
    typed: _Typed,
    inside: tuple[str, ...] = (),
) -> None:
    """Append what gives a type its name, as far as source can carry it: without its type an option is not checked.
    ``inside``: the types whose definitions need it."""
    if name not in known or name in lines or name in inside:
        return
    more = dict(lines)
    try:
        _carry(name, known[name], more, label=label, typed=typed)
    except ConfigError:
        more, line = dict(lines), _binding(name, _script(known))
        used = [] if line is None else [*global_names(line), *inherited_names(line)]
        for each in used:
            _carry_type(each, known, more, label=label, typed=typed, inside=(*inside, name))
        if line is None or any(each not in more and (each in known or not hasattr(builtins, each)) for each in used):
            return
        more[name] = line
    lines.update(more)


def _binding(name: str, script: ast.Module) -> str | None:
    """Return the statement of a script that imports a type, or that defines it from others; None if there is none."""
    for node in reversed(script.body):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                if (each.asname or each.name) == name:
                    return f"from {node.module} import {each.name} as {name}"
        if isinstance(node, ast.Assign | ast.AnnAssign) and _targets(node) == {name}:
            return f"{name} = {ast.unparse(node.value)}" if isinstance(node.value, ast.Subscript | ast.BinOp) else None
    return None


def _targets(statement: ast.Assign | ast.AnnAssign) -> set[str]:
    """Return the names that an assignment stores or changes."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {part.id for each in targets for part in ast.walk(each) if isinstance(part, ast.Name)}


def _script(known: Mapping[str, Any]) -> ast.Module:
    """Return the script that has these globals, or the cells of the notebook without those that are no Python."""
    script = ast.Module([], [])
    file = known.get("__file__")
    for part in known.get("In", ()) if file is None else ["".join(linecache.getlines(str(file)))]:
        with contextlib.suppress(SyntaxError, ValueError):
            script.body += ast.parse(str(part)).body
    return script


def _literal(value: Any) -> str | None:
    """Return the literal of a constant or a container of constants, equal in all processes; None for other values."""
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")'
    if type(value) in (bool, int, float, str, bytes, type(None)):
        return repr(value)
    if type(value) is dict:
        pairs = [(_literal(key), _literal(each)) for key, each in value.items()]
        return None if any(None in pair for pair in pairs) else f"{{{', '.join(f'{a}: {b}' for a, b in pairs)}}}"
    if type(value) in (list, tuple, set, frozenset):
        parts = [_literal(each) for each in value]
        if None in parts:
            return None
        ordered = sorted(map(str, parts)) if isinstance(value, set | frozenset) else map(str, parts)
        return f"{type(value).__name__}([{', '.join(ordered)}])"
    return None
