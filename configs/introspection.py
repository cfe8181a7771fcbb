"""Reads tables and options of components from source files without importing them, as commands that only read do.

A result is None if the source text does not decide it; a later import then does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

_PLAIN_BASES = {"object", "Protocol", "ABC", "Generic"}


def table(import_string: str) -> dict[str, str]:
    """Return the names and strings of the ``Table`` that ``"package.module:NAME"`` assigns.

    Raises:
        LookupError: there is no such assignment.
    """
    module, _, name = import_string.partition(":")
    for node in _statements(_parse(module)):
        value = _assigned(node, name)
        if isinstance(value, ast.Call):
            return dict(ast.literal_eval(value.args[0]))
    raise LookupError(f"{import_string} is no table")


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module, without importing it or its parents; None if it does not exist."""
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
    except ValueError:
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec


def options(import_string: str, *, skipped: int = 0) -> dict[str, str] | None:
    """Return the parameters of a dataclass, class or function with their types; None if its text does not decide.

    Args:
        import_string: the object.
        skipped: number of leading parameters of a function that are not options, because flowmill passes them.
    """
    module, _, name = import_string.partition(":")
    for node in _statements(_parse(module)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _parameters(node, skip=skipped) if not node.decorator_list else None
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _class_options(node, module)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return options(f"{node.module}:{alias.name}", skipped=skipped)
    return None


def _class_options(node: ast.ClassDef, module: str) -> dict[str, str] | None:
    inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    if inits:
        return _parameters(inits[0], skip=1)
    if any(item.arg is not None for item in node.keywords) or not all(map(_is_dataclass, node.decorator_list)):
        return None
    fields: dict[str, str] = {}
    for base in node.bases:
        inherited = _base_options(base, module)
        if inherited is None:
            return None
        fields |= inherited
    return fields | _fields(node) if node.decorator_list else fields


def _base_options(base: ast.expr, module: str) -> dict[str, str] | None:
    plain = base.value if isinstance(base, ast.Subscript) else base
    if not isinstance(plain, ast.Name):
        return None
    return {} if plain.id in _PLAIN_BASES else options(f"{module}:{plain.id}")


def _assigned(node: ast.stmt, name: str) -> ast.expr | None:
    """Return the value that a statement assigns to a name."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    assigns = any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return node.value if assigns and isinstance(node, ast.Assign | ast.AnnAssign) else None


def _is_dataclass(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id == "dataclass"


def _fields(node: ast.ClassDef) -> dict[str, str]:
    fields = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            keywords = item.value.keywords if isinstance(item.value, ast.Call) else []
            hidden = any(k.arg == "init" and isinstance(k.value, ast.Constant) and not k.value.value for k in keywords)
            kind = ast.unparse(item.annotation)
            if not hidden and "ClassVar" not in kind:
                fields[item.target.id] = kind
    return fields


def _parameters(node: ast.FunctionDef, *, skip: int) -> dict[str, str] | None:
    arguments = node.args
    if arguments.vararg is not None or arguments.kwarg is not None:
        return None
    taken = [*arguments.posonlyargs, *arguments.args][skip:] + arguments.kwonlyargs
    return {item.arg: "" if item.annotation is None else ast.unparse(item.annotation) for item in taken}


def _statements(tree: ast.AST | None) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, including those inside if and try."""
    for node in ast.iter_child_nodes(tree) if tree is not None else ():
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(node)


@cache
def _parse(module: str) -> ast.Module | None:
    spec = find_module(module)
    loader = None if spec is None else spec.loader
    # Not of a file alone: a config may carry the source of a module.
    if spec is None or not isinstance(loader, InspectLoader):
        return None
    try:
        source = loader.get_source(spec.name)
        return None if source is None else ast.parse(source)
    except (ImportError, OSError, SyntaxError, ValueError):
        return None
