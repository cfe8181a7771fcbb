"""A package that is deferred is imported when it is used, once, and what looks at a run uses none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, ConfigFactory
from tests.support.inside import prepare, run_epoch

pytestmark = pytest.mark.slow

_PACKAGE = {
    "heavy/__init__.py": "import heavy.part\nfrom heavy.part import COUNT\nSIZE = 3\n",
    "heavy/part.py": "import builtins\nbuiltins.parts = getattr(builtins, 'parts', 0) + 1\nCOUNT = 7\n",
    "heavy/apart.py": "NAME = 'apart'\n",
    "names_it.py": "import heavy\ndef size():\n    return heavy.SIZE\n",
    "names_part.py": "import heavy.part\nfrom heavy import apart\nCOUNT = heavy.part.COUNT\n",
}
_BEGIN = "import sys, builtins\nfrom configs.lazy_import import deferred\n"
_LOADED = "'heavy.part' in sys.modules"


def carried_out(folder: Path, code: str) -> list[str]:
    for name, text in _PACKAGE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-c", _BEGIN + code]
    environment = {"PYTHONPATH": f"{ROOT}:{folder}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_only_names_a_package_does_not_import_it(tmp_path: Path) -> None:
    code = f"with deferred('heavy'):\n    import names_it as n\n    print({_LOADED})\n    print(n.size(), {_LOADED})"
    assert carried_out(tmp_path, code) == ["False", "3", "True"]


@pytest.mark.parametrize(
    "statement",
    [
        "import names_part",
        "from heavy import SIZE",
        "import heavy.part",
        "from heavy.part import COUNT",
        "import heavy.apart",
    ],
)
def test_parts_of_it_are_imported_once_with_it(tmp_path: Path, statement: str) -> None:
    code = (
        f"with deferred('heavy'):\n    {statement}\nimport heavy.part\n"
        "print(builtins.parts, heavy.SIZE, heavy.part.COUNT, type(heavy.part.__spec__.loader).__name__)"
    )
    assert carried_out(tmp_path, code) == ["1", "3", "7", "SourceFileLoader"]


def test_afterwards_it_is_as_if_it_had_not_been_named(tmp_path: Path) -> None:
    code = (
        "with deferred('heavy'):\n    import names_it\nprint('heavy' in sys.modules, len(sys.meta_path))\n"
        "import heavy\nprint(names_it.size(), builtins.parts, heavy.SIZE)"
    )
    found = carried_out(tmp_path, code)
    assert found[0] == "False"
    assert found[2:] == ["3", "1", "3"]


def test_a_package_that_is_imported_or_missing_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import heavy\nwith deferred('heavy'), deferred('nowhere'):\n    print(type(heavy).__name__)\n"
        "    print('nowhere' in sys.modules)"
    )
    assert carried_out(tmp_path, code) == ["module", "False"]


def test_an_import_that_fails_fails_as_it_would_have(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('why')\n")
    code = (
        "try:\n    with deferred('broken'):\n        import broken\n        broken.anything\n"
        "except RuntimeError as error:\n    print(error, 'broken' in sys.modules, len(sys.meta_path))"
    )
    assert carried_out(tmp_path, code)[:2] == ["why", "False"]


@pytest.mark.parametrize(
    ("command", "needless"),
    [
        ("report small --out report.html", {"torch"}),
        ("status small", {"torch", "numpy", "pyarrow"}),
        ("status", {"torch", "numpy", "pyarrow"}),
        ("status --why optimize@1 small", {"torch", "numpy", "pyarrow"}),
        ("diff small small", {"torch", "numpy", "pyarrow"}),
    ],
)
def test_what_looks_at_a_run_computes_nothing(
    make_config: ConfigFactory, tmp_path: Path, command: str, needless: set[str]
) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    code = (
        f"sys.argv = ['flowmill', *'{command}'.split(), '--root', '{context.store.root.uri}']\n"
        "from flows.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('\\nloaded', {needless} & {{*sys.modules}} or 'none')"
    )
    assert carried_out(tmp_path, code)[-2:] == ["loaded", "none"]


@pytest.mark.parametrize(
    ("code", "needless"),
    [
        ("main()", {"diffusers", "transformers", "torch.distributed.tensor", "prefect", "mlflow"}),
        ("import flows.pipeline", {"diffusers", "transformers", "mlflow"}),
    ],
)
def test_what_people_wait_for_loads_no_library_of_later_work(tmp_path: Path, code: str, needless: set[str]) -> None:
    code = (
        "sys.argv = ['flowmill', 'check', 'digits']\nfrom flows.cli import main\n"
        f"try:\n    {code}\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('\\nloaded', {needless} & {{*sys.modules}} or 'none')"
    )
    assert carried_out(tmp_path, code)[-2:] == ["loaded", "none"]
