"""The command's manners, as real processes: first output, typos, signals, a user's own files in the way, tables."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from tests.conftest import ROOT
from tests.support.preloaded import run_forked

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "flowmill.flows.cli"]
DIGITS = str(ROOT / "configs" / "digits.yaml")
#: Modules of libraries that take long to import; a typo must be found without them.
HEAVY = {"torch", "diffusers", "transformers", "prefect", "mlflow", "pyarrow", "numpy", "sklearn"}


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which this tree is the installed one, regardless of the working directory."""
    path = f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}" if "PYTHONPATH" in os.environ else str(ROOT)
    return {**os.environ, "PYTHONPATH": path, **more}


def call(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def imported(stderr: str) -> set[str]:
    """Return the top-level modules a process under -X importtime imported."""
    return set(re.findall(r"\|\s+(\w+)$", stderr, re.MULTILINE))


# Typos, before anything heavy


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimize.lr=1", "unknown setting 'optimize.lr'. Did you mean 'learning_rate'"),
        ("rewards.0.name=digit", "reward 'digit' does not exist. Did you mean 'digits'"),
        ("prompts.train=prompts/digits-trian.txt", "Did you mean 'prompts/digits-train.txt'"),
    ],
)
def test_typos_are_refused_before_anything_heavy_is_imported(override: str, expected: str) -> None:
    refused_lightly("run", override, expected)


def test_check_refuses_typos_as_run_does() -> None:
    refused_lightly("check", "evaluate.judges.0.name=digit", "Did you mean 'digits'")


def refused_lightly(command: str, override: str, expected: str) -> None:
    line = [sys.executable, "-X", "importtime", "-m", "flowmill.flows.cli", command, DIGITS, "--set", override]
    result = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    message = next(text for text in result.stderr.splitlines() if text.startswith("flowmill: "))
    assert result.returncode == 1
    assert message.startswith(f"flowmill: --set {override}: ")
    assert expected in message
    assert not imported(result.stderr) & HEAVY
    assert "yaml" in imported(result.stderr)


def test_a_mistyped_config_or_model_folder_names_its_neighbor(
    config_file: Path, tiny_base: Path, tmp_path: Path
) -> None:
    assert "Did you mean 'small.yaml'" in call("run", "smal.yaml", cwd=tmp_path).stderr
    (tmp_path / "my-model").symlink_to(tiny_base)
    result = call("check", "small.yaml", "--set", "model.path=my-modle", cwd=tmp_path)
    assert result.stderr.startswith("flowmill: --set model.path=my-modle: model.path 'my-modle' is no folder. ")
    assert "Did you mean 'my-model'?" in result.stderr


def test_a_mistyped_stage_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "store" / "runs").mkdir(parents=True)
    line = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "flowmill.flows.cli",
        "stage",
        "scor",
        "--run",
        "x",
        "--root",
        "store",
    ]
    result = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert "flowmill: stage 'scor' does not exist. Did you mean 'score'" in result.stderr
    assert not imported(result.stderr) & HEAVY


@pytest.mark.parametrize(
    "arguments", [["presets", "--kind", "tokens"], ["--help"], ["presets", "--help"]], ids=" ".join
)
def test_lists_and_help_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    line = [sys.executable, "-X", "importtime", "-m", "flowmill.flows.cli", *arguments]
    result = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert not imported(result.stderr) & HEAVY


# The first line


@pytest.mark.parametrize("command", ["run", "check", "stage", "status"])
def test_the_first_line_costs_less_than_a_second(command: str, config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "runs").mkdir(parents=True)
    root = ["--root", str(tmp_path / "store")]
    arguments = {
        "run": [str(config_file), *root],
        "check": [str(config_file)],
        "stage": ["score", "--run", "small", *root],
        "status": root,
    }[command]
    process = subprocess.Popen([*COMMAND, command, *arguments], env=environment(), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        times = psutil.Process(process.pid).cpu_times()
    finally:
        process.kill()
        process.communicate()
    assert first.startswith((b"reading ", b"score of run"))
    # Of its own time: what other processes take of the machine is not the command's.
    assert times.user + times.system < 1.0


def test_quiet_and_json_say_nothing_else(config_file: Path, preloaded: str, tmp_path: Path) -> None:
    def forked(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_forked(preloaded, arguments, cwd=tmp_path, env=environment(), timeout=300)

    assert forked("check", "small.yaml", "--json").stdout.startswith("{")
    quiet = forked("run", "small.yaml", "--quiet", "--set", "rewards.0.name=nope")
    assert (quiet.stdout, quiet.returncode) == ("", 1)


def test_version_and_completion(tmp_path: Path) -> None:
    assert re.fullmatch(r"flowmill \d+\.\d+\.\d+\S*\n", call("--version", cwd=tmp_path).stdout)
    words = {"_FLOWMILL_COMPLETE": "complete_bash", "COMP_WORDS": "flowmill st", "COMP_CWORD": "1"}
    assert call(cwd=tmp_path, **words).stdout.split() == ["stage", "status", "store"]
    helped = call("--help", cwd=tmp_path, COLUMNS="200").stdout
    assert "--install-completion" in helped
    assert "--show-completion" in helped


# Roots that are not there


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["store", "ls"],
        ["store", "show", "policies/0"],
        ["store", "verify"],
        ["store", "digest", "small"],
        ["store", "gc"],
        ["store", "repair"],
        ["store", "export", "small", "out"],
        ["stage", "score", "--run", "small"],
        ["ui"],
    ],
    ids=" ".join,
)
def test_a_mistyped_root_makes_no_folder_and_names_its_neighbor(
    command: list[str], preloaded: str, tmp_path: Path
) -> None:
    (tmp_path / "my-store" / "runs").mkdir(parents=True)
    arguments = [*command, "--root", "my-stroe"]
    result = run_forked(preloaded, arguments, cwd=tmp_path, env=environment(), timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith(
        f"flowmill: There is no store at '{tmp_path / 'my-stroe'}'. Did you mean 'my-store'?"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["my-store"]
    assert [path.name for path in (tmp_path / "my-store").iterdir()] == ["runs"]


def test_a_folder_that_is_no_store_stays_as_it_is(tmp_path: Path) -> None:
    result = call("store", "ls", "--root", ".", cwd=tmp_path)
    assert "holds no store" in result.stderr
    assert list(tmp_path.iterdir()) == []


# Tables


@pytest.fixture
def listed(tmp_path: Path) -> str:
    """The id of an artifact of a store in tmp_path / store."""
    store = ArtifactStore(str(tmp_path / "store"))
    ref = ArtifactRef("trajectories", "0123456789abcdef" * 2 + "-a2")
    with store.root.staging() as folder:
        (folder / "data").write_bytes(b"x")
        store.commit(ref, "000000-000012", folder, rows=144)
    return str(ref)


def test_ids_are_not_cut_in_a_pipe(listed: str, tmp_path: Path) -> None:
    shown = call("store", "ls", "--root", "store", cwd=tmp_path, COLUMNS="60").stdout
    assert [line for line in shown.splitlines() if listed in line and "144" in line]
    assert "…" not in shown


def test_shortened_ids_on_a_narrow_terminal_lead_to_their_artifact(listed: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    line = [*COMMAND, "store", "ls", "--root", "store"]
    process = subprocess.Popen(line, cwd=tmp_path, env=environment(COLUMNS="60"), stdout=theirs)
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:
            break
    assert process.wait() == 0
    (short,) = re.findall(r"trajectories/\w+", shown.decode())
    assert listed.startswith(short)
    assert listed in call("store", "show", short, "--root", "store", cwd=tmp_path).stdout
    assert "…" not in shown.decode()


# Files of the user's own with the names of our packages


@pytest.fixture
def crowded(config_file: Path, tmp_path: Path) -> Path:
    """A working folder with a tasks.py, and models/, storage/ and configs/ that end any process importing them."""
    trap = "raise SystemExit('imported the wrong one')\n"
    (tmp_path / "tasks.py").write_text(trap)
    for name in ("models", "storage", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(trap)
    (tmp_path / "models" / "mine.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "my_reward.py").write_text(
        "class Redness:\n"
        "    def score(self, media, prompts, metadata):\n"
        "        return media[..., 0].mean((1, 2)) / 255\n"
    )
    return tmp_path


@pytest.mark.campaign_cases("plain")
@pytest.mark.parametrize("path", ["", pytest.param(".", marks=pytest.mark.campaign)], ids=["plain", "PYTHONPATH=."])
def test_a_crowded_folder_does_not_break_the_command(crowded: Path, path: str) -> None:
    rewards = 'rewards=[{name: "my_reward:Redness"}]'
    more = {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"} if path else {}
    result = call("check", "small.yaml", "--set", rewards, cwd=crowded, **more)
    assert result.returncode == 0, result.stderr
    assert "The config can run." in result.stdout


@pytest.mark.campaign
def test_ranks_in_a_crowded_folder_run_ours(crowded: Path) -> None:
    # One write for a line: two ranks write to one pipe.
    text = "import os, sys\nfrom flowmill import tasks\nos.write(1, f'rank {tasks.__file__} {sys.argv}\\n'.encode())\n"
    (crowded / "my_worker.py").write_text(text)
    imports = (
        "from flowmill.tasks.execution.launch import Launched; "
        "from flowmill.tasks.execution.launchers import Local, Program"
    )
    program = "Program(module='my_worker', arguments=('a',), processes=2)"
    code = f"{imports}; [print(line) for line in Launched({program}, Local()).lines(1)]"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=crowded, env=environment(), capture_output=True, text=True, check=False
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("rank")]
    assert len(lines) == 2, result.stdout + result.stderr
    assert all("tasks/__init__.py" in line and str(ROOT) in line and line.endswith("'a']") for line in lines)


def rank(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a rank's program in a folder, without installed packages, below a process with words in its command."""
    code = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-P', '-S', *sys.argv[1:3]]))"
    line = [sys.executable, "-c", code, str(ROOT / "tasks" / "execution" / "rank.py"), "child", *words]
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    return subprocess.run(line, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def test_a_rank_finds_flowmill_beside_itself(crowded: Path) -> None:
    (crowded / "child.py").write_text("from flowmill import tasks\nprint(tasks.__file__)\n")
    result = rank(crowded, str(ROOT / "tasks" / "execution" / "agent.py"))
    assert Path(result.stdout.strip()).resolve() == ROOT / "tasks" / "__init__.py", result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for the parent")
def test_a_rank_whose_agent_is_gone_ends(crowded: Path) -> None:
    (crowded / "child.py").write_text("print('began')\n")
    result = rank(crowded)
    assert result.stdout == ""
    assert "torchrun's agent, which started this process, is gone" in result.stderr


def test_an_import_string_may_begin_with_the_name_of_one_of_our_folders(crowded: Path) -> None:
    (crowded / "models" / "__init__.py").write_text("")
    (crowded / "models" / "mine.py").write_text((crowded / "my_reward.py").read_text())
    result = call("check", "small.yaml", "--set", "rewards=[{name: 'models.mine:Redness'}]", cwd=crowded, PYTHONPATH="")
    assert result.returncode == 0, result.stderr


# Signals


@pytest.mark.campaign_cases("training, SIGTERM")
@pytest.mark.parametrize(
    ("after", "number", "code"),
    [
        ("reading", signal.SIGINT, 130),
        pytest.param("loading torch", signal.SIGTERM, 143, marks=pytest.mark.campaign),
        pytest.param("base: ", signal.SIGINT, 130, marks=pytest.mark.campaign),
        ("epoch 1/", signal.SIGTERM, 143),
    ],
    ids=["imports, Ctrl-C", "start-up, SIGTERM", "sampling, Ctrl-C", "training, SIGTERM"],
)
def test_a_signal_says_what_stays_and_how_to_go_on(
    after: str, number: signal.Signals, code: int, config_file: Path, prefect_home: Path, tmp_path: Path
) -> None:
    build = "{name: digits, options: {steps: 3, vae_steps: 3, images: 99}}"
    line = [*COMMAND, "run", "small.yaml", "--root", "my store", "--set", "run.epochs=50"]
    line += ["--set", "model.path=null", "--set", f"model.build={build}"]
    variables = environment(COLUMNS="200", PREFECT_HOME=str(prefect_home))
    variables.pop("PREFECT_API_URL", None)
    process = subprocess.Popen(
        line,
        cwd=tmp_path,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that started us in the background had Ctrl-C ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert any(after in text for text in process.stdout)
        time.sleep(0.3)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code
    sent = {130: "Ctrl-C", 143: "SIGTERM"}[code]
    assert f"flowmill: stopped by {sent}." in stderr
    assert "Committed data stays. To go on, give the same command again:" in stderr
    assert "flowmill run small.yaml --root 'my store' --set run.epochs=50" in stderr
    assert "Traceback" not in stderr
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    if after == "epoch 1/":
        assert re.search(r"Run 'small' in '.*/my store' has [1-9]\d* of 50 epochs", stderr)
