"""Small scripts that show one fault each; a script exits with 0 while the product behaves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CASES = sorted(path.name for path in (ROOT / "tests" / "cases").glob("*.py"))


@pytest.mark.campaign_cases("ddim_end_of_chain_is_level_zero.py")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_case_behaves(name: str) -> None:
    command = [sys.executable, str(ROOT / "tests" / "cases" / name)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
