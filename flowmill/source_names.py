"""The names that definitions in source use and need, and their order, from their text alone."""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import symtable
import sys
from collections.abc import Mapping

#: The first line of a source: its annotations are not evaluated.
FUTURE = "from __future__ import annotations"
#: Bodies that are executed when they are called.
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def types_of_options(source: str) -> list[str]:
    """Return the names in annotations of options, sorted: of a class's fields and of parameters after the metadata."""
    annotations: list[ast.expr | None] = []
    for node in ast.parse(source).body:
        parts = node.body if isinstance(node, ast.ClassDef) else [node]
        annotations += [part.annotation for part in parts if isinstance(part, ast.AnnAssign)]
        for part in parts:
            if isinstance(part, ast.FunctionDef) and (part is node or part.name == "__init__"):
                given = 3 if part is node else 1
                taken = [*part.args.posonlyargs, *part.args.args][given:] + part.args.kwonlyargs
                annotations += [each.annotation for each in taken]
    names = set[str]()
    while annotations:
        for each in ast.walk(annotations.pop() or ast.Pass()):
            if isinstance(each, ast.Name):
                names.add(each.id)
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                with contextlib.suppress(SyntaxError):
                    annotations.append(ast.parse(each.value, mode="eval").body)
    return sorted(names)


def submodules(lines: Mapping[str, str]) -> list[str]:
    """Return imports of the submodules that definitions reach from a package, sorted: a package that is imported alone
    may lack them."""
    packages = {name: line.split()[1] for name, line in lines.items() if line.startswith("import ")}
    reached = set[str]()
    for node in ast.walk(ast.parse("\n".join(lines.values()))):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in packages:
            path = [packages[node.id], *reversed(parts)]
            reached |= {".".join(path[:count]) for count in range(2, len(path) + 1)}
    return [f'__import__("{module}")' for module in sorted(reached & sys.modules.keys())]


def global_names(source: str) -> list[str]:
    """Return the global names that a definition uses, sorted."""
    names, tables = set[str](), [symtable.symtable(f"{FUTURE}\n{source}", "<source>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        names |= {
            each.get_name()
            for each in table.get_symbols()
            if each.is_referenced() and (each.is_global() or (top and not each.is_assigned()))
        }
    return sorted(names)


def inherited_names(source: str) -> list[str]:
    """Return the global names that give attributes of classes, or a global itself, their first value, as in ``scale =
    scale``, sorted: those that are read before they are set."""
    names, codes = set[str](), [compile(f"{FUTURE}\n{source}", "<source>", "exec")]
    while codes:
        code, read, stored = codes.pop(), set[str](), set[str]()
        codes += filter(inspect.iscode, code.co_consts)
        # Functions, comprehensions and lambdas have other instructions for names of their own.
        for each in dis.get_instructions(code):
            if each.opname == "LOAD_NAME":
                read |= {each.argval} - stored
            if each.opname == "STORE_NAME":
                stored.add(each.argval)
        names |= read & stored
    return sorted(names)


def in_order(lines: Mapping[str, str]) -> list[str]:
    """Return definitions in their order, but each after those that it needs to be executed: others may use each other.

    These are the names outside the bodies of functions, and all names in functions that are called there.
    """
    placed: dict[str, str] = {}

    def place(name: str, inside: tuple[str, ...]) -> None:
        if name in placed or name in inside:
            return
        for needed in _needed(name, lines):
            place(needed, (*inside, name))
        placed[name] = lines[name]

    for each in lines:
        place(each, ())
    return [*placed.values()]


def _needed(name: str, lines: Mapping[str, str]) -> list[str]:
    """Return the other names that the execution of a definition needs, sorted."""
    names, called = set[str](), list[str]()
    nodes: list[tuple[ast.AST, bool]] = [(node, False) for node in ast.parse(lines[name]).body]
    while nodes:
        node, is_called = nodes.pop()
        if isinstance(node, ast.Name) and node.id in lines:
            names.add(node.id)
            called += [node.id] * is_called
        decorators = getattr(node, "decorator_list", [])
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns") or (field == "body" and isinstance(node, _LATER)):
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    nodes.append((each, is_called or isinstance(node, ast.Call) or each in decorators))
    while called:
        source = lines[called.pop()]
        used = [*global_names(source), *inherited_names(source)]
        more = [each for each in used if each in lines and each not in names]
        names.update(more)
        called += more
    return sorted(names - {name})
