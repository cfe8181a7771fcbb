"""The docs are true: every command and preset is documented, links lead somewhere, and code blocks run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from flows.cli import app
from models.rewards import REWARDS
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)


def commands() -> list[str]:
    """Return every command line up to its arguments: 'flowmill store ls' and so on."""
    found = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [f"flowmill {name} {sub}" for sub in inner] if inner else [f"flowmill {name}"]
    return found


@pytest.mark.parametrize("command", commands())
def test_every_command_and_option_is_documented(command: str) -> None:
    assert f"`{command}" in TEXT
    node = get_command(app)
    for word in command.split()[1:]:
        node = node.commands[word]  # type: ignore[attr-defined]
    line = next(line for line in (ROOT / "docs" / "operating.md").read_text().splitlines() if f"`{command}" in line)
    for parameter in node.params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            option = max(parameter.opts, key=len)
            assert option in line, f"{option} of {command} is not documented"


@pytest.mark.parametrize("preset", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_documented_and_says_how_to_run_it(preset: Path) -> None:
    assert f"`configs/{preset.name}`" in (ROOT / "docs" / "operating.md").read_text()
    assert f"flowmill run configs/{preset.name}" in preset.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.fixture
def pasted(prefect_server: str, tmp_path: Path) -> Callable[[list[str]], str]:
    """Return what runs a command in an empty folder, the same every time, and gives its output."""
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "bin").mkdir()
    launcher = f'#!/bin/sh\nexec {sys.executable} -m flows.cli "$@"\n'
    (tmp_path / "bin" / "flowmill").write_text(launcher)
    (tmp_path / "bin" / "flowmill").chmod(0o755)
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": prefect_server}
    environment["HF_HOME"] = str(tmp_path / "hf")

    def run(command: list[str]) -> str:
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, command[-1] + result.stdout + result.stderr
        return result.stdout

    return run


@pytest.mark.slow
def test_the_example_in_the_readme_works_as_pasted_and_the_store_reads_as_documented(
    pasted: Callable[[list[str]], str],
) -> None:
    (block,) = re.findall(r"(?<!<!-- shown -->\n)```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(block.splitlines()) <= 20
    assert "my_reward:Redness" in pasted(["bash", "-euo", "pipefail", "-c", block])
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "store.md").read_text(), re.DOTALL):
        assert pasted([sys.executable, "-c", code]).strip()


@pytest.mark.slow
def test_rewards_of_your_own_work_as_pasted(pasted: Callable[[list[str]], str]) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)
    function, options, several = [pasted(["bash", "-euo", "pipefail", "-c", block]) for block in blocks]
    assert "my_rewards:redness" in function
    assert "my_rewards:Brightness" in options
    assert "my_rewards:redness" in several
    assert "my_rewards:Brightness" in several
    declared, tested, head = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)
    test = shlex.quote(f"{tested}\n{declared}\ndef test_declared():\n    assert most_unlike.needs.groupwise\n")
    assert "8 passed" in pasted(["bash", "-c", f"printf %s {test} > test_mine.py; {sys.executable} -m pytest -q ."])
    pasted([sys.executable, "-c", head])


def test_every_reward_is_documented() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text().partition("## Built in")[2]
    assert re.findall(r"^\| `([a-z0-9_]+)` \|", page, re.MULTILINE) == sorted(REWARDS)
