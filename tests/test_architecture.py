"""The house: who may import whom, what stays out of which room, and that every table entry exists."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

from flowmill.tasks.specs.modalities import MODALITIES
from tests.support import rooms
from tools.size import documented_lines, room_lines

# One process reads the files for all of them.
pytestmark = pytest.mark.xdist_group("architecture")
ROOT = Path(__file__).parent.parent
ALLOWED = {
    "configs": set(),
    "storage": {"configs"},
    "models": {"configs"},
    "tasks": {"configs", "storage", "models"},
    "flows": {"configs", "storage", "tasks"},
    # What a person imports.
    "flowmill": {"configs", "storage", "models", "tasks", "flows"},
}
FILES = [path for room in ALLOWED for path in (ROOT / room).rglob("*.py")]


@cache
def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {rooms.short(alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(rooms.short(node.module).split(".")[0])
    return found


def test_imports_follow_the_direction() -> None:
    wrong = {}
    for path in FILES:
        room = path.relative_to(ROOT).parts[0]
        if found := (imports(path) & set(ALLOWED)) - ALLOWED[room] - {room}:
            wrong[str(path)] = found
    assert wrong == {}


def test_rooms_import_only_rooms_before_them() -> None:
    assert rooms.upward() == []
    for package, order in rooms.ORDER.items():
        named = {name.split(".")[1] for name in rooms.modules() if name.startswith(f"{package}.")}
        assert named == set(order), "a room without a place, or a file left over beside them"


def test_rooms_do_not_grow() -> None:
    documented = documented_lines((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    grown = {
        room: f"{lines} lines, {documented.get(room, 0)} documented"
        for room, lines in room_lines().items()
        if lines > 1.02 * documented.get(room, 0)
    }
    assert grown == {}, "take lines away, or say in the commit why they are worth it: python -m tools.size --write"


@pytest.mark.parametrize("package", [*ALLOWED, "pages"])
def test_the_docs_name_the_rooms_that_exist(package: str) -> None:
    exist = {path.parent.name for path in (ROOT / package).glob("*/__init__.py") if not path.parent.is_symlink()}
    tree = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    block = re.search(rf"^{package}/.*\n(?: .*\n)*", tree, re.MULTILINE)
    assert block, f"docs/architecture.md does not list {package}/"
    named = set(re.findall(r"(\w+)/(?:\s|$)", block.group(), re.MULTILINE)) - {package}
    assert named == exist, "the tree in docs/architecture.md"
    if package in rooms.ORDER:
        text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))) or ""
        listed = re.search(r"before it: ([^.]*)\.", text)
        assert listed, f"the docstring of {package} lists no rooms"
        assert re.split(r",\s+", listed.group(1)) == [room for room in rooms.ORDER[package] if room in exist]


def test_no_files_import_each_other() -> None:
    assert rooms.circles() == []


def test_no_room_of_tasks_is_a_hall() -> None:
    lines = Counter[str]()
    for name in rooms.modules():
        if name.startswith("tasks"):
            lines[rooms.room_of(name)] += rooms.lines_of(name)
    assert {room for room, count in lines.items() if count > 0.15 * lines.total()} == set()


def test_every_room_says_what_is_in_it() -> None:
    silent = [name for name in rooms.modules() if name.startswith(("models", "tasks")) and not _docstring(name)]
    assert silent == []


def test_every_method_of_a_family_stage_or_kind_has_or_inherits_a_docstring() -> None:
    kinds = (FunctionType, classmethod, staticmethod, property)
    rooms_of_them = ("models.policies.", "tasks.modalities.", "tasks.stages.")
    modules = [import_module(f"flowmill.{name}") for name in rooms.modules() if name.startswith(rooms_of_them)]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    methods = [
        (made, name)
        for made in classes
        if made.__module__.removeprefix("flowmill.").startswith(rooms_of_them) and not made.__name__.startswith("_")
        for name, value in vars(made).items()
        if isinstance(value, kinds) and not name.startswith("_")
    ]
    assert len(methods) > 300
    assert [f"{made.__name__}.{name}" for made, name in methods if not inspect.getdoc(getattr(made, name))] == []


def _docstring(name: str) -> str | None:
    return ast.get_docstring(ast.parse(rooms.modules()[name].read_text()))


@pytest.mark.parametrize("kind", MODALITIES)
def test_only_a_kind_itself_and_the_tables_know_it(kind: str) -> None:
    own = (f"tasks.modalities.{kind}", f"tasks.specs.{kind}", f"tasks.algorithms.{kind}")
    # An algorithm is of one kind, and says so.
    free = (*own, "tasks.algorithms.", "tasks.export.", "tests.", "tools.", "pages.")
    asking = {
        name: sorted(found)
        for name, others in rooms.imports().items()
        if not name.startswith(free) and (found := {other for other in others if other.startswith(own)})
    }
    assert asking == {}
    naming = [
        name
        for name in rooms.modules()
        if name.startswith(("tasks.", "flows."))
        and not name.startswith((*free, "tasks.algorithms", "tasks.specs.", "tasks.modalities"))
        and f'"{kind}"' in _code(name)
    ]
    assert set(naming) <= {"tasks.inputs.policy_kind"}


def _code(name: str) -> str:
    return rooms.modules()[name].read_text()


def test_prefect_is_imported_by_flows_only() -> None:
    users = {path.relative_to(ROOT).parts[0] for path in FILES if "prefect" in imports(path)}
    assert users == {"flows"}


def test_mlflow_is_imported_by_one_room() -> None:
    users = {str(path.relative_to(ROOT).parent) for path in FILES if "mlflow" in imports(path)}
    assert users == {"tasks/tracking"}


def test_nothing_unpickles() -> None:
    picklers = {
        str(path.relative_to(ROOT)) for path in FILES if imports(path) & {"pickle", "dill", "cloudpickle", "shelve"}
    }
    assert picklers == set()
    # Its pool of processes, which a run starts itself; not its files.
    users = {str(path.relative_to(ROOT)) for path in FILES if "joblib" in imports(path)}
    assert users == {"tasks/execution/process_executor.py"}
    used = [
        line for line in (ROOT / "tasks/execution/process_executor.py").read_text().splitlines() if "joblib" in line
    ]
    assert [line.split(" import ")[0] for line in used[1:]] == [
        "from joblib.externals.loky",
        "from joblib.externals.loky.process_executor",
    ]


def test_home_folders_are_found_in_one_place() -> None:
    """``Path.expanduser`` alone gives a traceback for a user that the machine does not know."""
    users = {str(path.relative_to(ROOT)) for path in FILES if ".expanduser()" in path.read_text(encoding="utf-8")}
    assert users == {"configs/user_directories.py"}


def test_light_modules_import_no_torch() -> None:
    """Configs, what verifies a store, the command line and the Python API."""
    modules = "flowmill.configs.schema, flowmill.storage.maintenance.verify, flowmill.flows.cli, flowmill"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_stages_and_families_are_named_without_their_large_libraries() -> None:
    code = (
        "import sys; from flowmill.configs.registry import imported, resolve; "
        "from flowmill.tasks.specs.stages import STAGES; from flowmill.models.policies import POLICIES; "
        "[imported(spec.stage, label='stage') for spec in STAGES.values()]; print('torch' in sys.modules); "
        "[resolve(POLICIES, name, label='entry') for name in POLICIES]; "
        "print(*sorted({'diffusers', 'transformers', 'peft', 'mlflow', 'prefect'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert said.split() == ["False"], "status reads the options of all of them, and should not wait for these"


def test_packages_listed_for_installation_are_the_folders() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    short = {".".join(path.parent.relative_to(ROOT).parts) for path in FILES if path.name == "__init__.py"}
    folders = {name if name.startswith("flowmill") else f"flowmill.{name}" for name in short}
    assert listed == folders


def test_functions_and_files_stay_short() -> None:
    too_long = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        if len(path.read_text().splitlines()) > 350:
            too_long.append(str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno > 60:
                too_long.append(f"{path}:{node.name}")
    assert not too_long


#: Crumbs, as many as there are today: modules of under 40 lines with one importer, and private functions that one
#: place calls which is such a function itself. Fewer are better; to add one, merge another.
SMALL_MODULES, CHAINED_FUNCTIONS = 7, 163


def test_crumbs_do_not_grow() -> None:
    names = [name for name in rooms.modules() if name.split(".")[0] in ALLOWED]
    importers = Counter(
        other for name in rooms.imports() if not name.startswith("tests.") for other in rooms.imports()[name]
    )
    small = [name for name in names if importers[name] == 1 and rooms.lines_of(name) < 40]
    small = [name for name in small if rooms.modules()[name].name != "__init__.py"]
    assert len(small) <= SMALL_MODULES, small
    chained = [f"{name}.{function}" for name in names for function in chained_functions(_code(name))]
    assert len(chained) <= CHAINED_FUNCTIONS, chained


def chained_functions(code: str) -> set[str]:
    """Return the private functions that one place calls which is such a function itself."""
    tree = ast.parse(code)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    counts = Counter(node.name for node in functions if node.name.startswith("_") and not node.name.endswith("_"))
    uses: dict[str, list[str]] = {name: [] for name, count in counts.items() if count == 1}

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "id", getattr(child, "attr", ""))
            uses.get(name, []).append(inside)
            visit(child, child.name if isinstance(child, ast.FunctionDef) else inside)

    visit(tree, "")
    single = {name: callers[0] for name, callers in uses.items() if len(callers) == 1}
    return {name for name, caller in single.items() if caller in single and caller != name}


def test_a_chain_of_private_functions_is_found() -> None:
    code = "def top():\n    return _one() + _two() + _two()\n\ndef _one():\n    return _below()\n"
    assert chained_functions(f"{code}\ndef _two():\n    return 2\n\ndef _below():\n    return 1\n") == {"_below"}


@pytest.mark.parametrize("package", rooms.ORDER)
def test_tests_of_a_room_have_its_path(package: str) -> None:
    tests = ROOT / "tests" / package
    found = {path.name for path in tests.iterdir() if (path / "__init__.py").exists()}
    assert found <= {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}, "folders that are no room"
    direct = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    assert direct <= {path.stem for path in (ROOT / package).glob("*.py")}, "tests of a room outside of its folder"


def test_specs_plan_chain_and_staleness_import_neither_torch_nor_arrow() -> None:
    """They name components and read records; none of them computes with tensors or reads tables."""
    names = (
        "flowmill.tasks.specs.stages",
        "flowmill.tasks.specs.plan",
        "flowmill.tasks.specs.identity",
        "flowmill.tasks.runs.chain",
        "flowmill.tasks.runs.staleness",
    )
    code = f"import sys, {', '.join(names)}; print(*sorted({{'torch', 'pyarrow'}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("package", ALLOWED)
def test_classes_of_a_package_have_their_own_names(package: str) -> None:
    names = Counter(
        node.name
        for path in (ROOT / package).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []
