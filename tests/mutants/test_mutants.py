"""The mutants themselves: what is changed, and that the lists of ``tools/mutants`` still fit the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants.__main__ import named_jobs, sample
from tools.mutants.campaign import ROOT
from tools.mutants.make import mutants
from tools.mutants.tables import EQUIVALENT, FILES, NAMED, TESTS, own_tests


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = (a + b) * c", ["x = (a - b) * c", "x = (a + b) / c"]),
        ("x += y", ["x -= y"]),
        ("x = a < b", ["x = a <= b", "x = a >= b"]),
        ("x = a is not b", ["x = a is b"]),
        (
            "x = a not in b and c or d",
            ["x = a in b and c or d", "x = a not in b or c or d", "x = a not in b and c and d"],
        ),
        ("x = not (a)", ["x = (a)"]),
        ("x = -a", ["x = a"]),
        ("x = 3", ["x = 2", "x = 4"]),
        ("x = 0", ["x = (-1)", "x = 1"]),
        ("x = 0.5", ["x = (-0.5)", "x = 1.0"]),
        ("x = True", ["x = False"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("x = a.clamp(low, high)", ["x = a.clamp(high, low)"]),
        ("x = a.clamp(min=low)", ["x = a.clamp(max=low)"]),
        ("x = range(a)", ["x = range((a) + 1)", "x = range((a) - 1)"]),
        ("x = a if b else c", ["x = a if (not b) else c"]),
        ("x = [a for a in b if a]", ["x = [a for a in b if (not a)]"]),
        ('x = zip(a, strict=True), f"{a + b}"', []),
        ("x: int | None", []),
    ],
)
def test_every_operator_is_changed_alone_and_in_place(line: str, expected: list[str]) -> None:
    source = f"# kept\n{line}\n".encode()
    made = [mutant.apply(source).decode().splitlines() for mutant in mutants("file.py", source)]
    assert all(lines[0] == "# kept" for lines in made)
    assert sorted(lines[1] for lines in made) == sorted(expected)


def test_named_and_equivalent_mutants_are_still_those_of_the_code() -> None:
    assert {job.label for job in named_jobs()} == {f"named: {named.name}" for named in NAMED}
    for each in EQUIVALENT:
        source = (ROOT / each.path).read_bytes()
        changes = {mutant.change(source) for mutant in mutants(each.path, source)}
        assert (each.before, each.after) in changes, f"{each.path}: {each.after}"
        assert each.reason


def test_every_file_has_tests_and_a_seed_draws_the_same_sample() -> None:
    files = {path.relative_to(ROOT).as_posix() for pattern in FILES for path in ROOT.glob(pattern)}
    assert len(files) > 20
    named = {test.partition("::")[0] for path in files for test in own_tests(path)}
    assert all(Path(ROOT, test).exists() for test in named)
    assert all(path in files or any(f.startswith(f"{path}/") for f in files) for path in TESTS)
    assert sample(20, 3) == sample(40, 3)[:20]
    assert sample(20, 3) != sample(20, 4)
