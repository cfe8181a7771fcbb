"""Fixtures: a tiny real base model, small configs, and a run of the whole pipeline in this process."""

from __future__ import annotations

import os
import tempfile

from flowmill.flows.environment import prepare_environment
from tests.support.shared import VARIABLE, Shared, once, where

# No test takes the power away, and waiting for disks took a sixth of the time; a closed descriptor is still an error.
setattr(os, "fsync", os.fstat)  # noqa: B010

_HOMES = ("PREFECT_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
if VARIABLE not in os.environ:
    # Prefect's database, logs and caches of the tests are their own, those of all processes of a test run together.
    os.environ |= {name: tempfile.mkdtemp(prefix="flowmill-tests-") for name in _HOMES}
# A server named in the environment is not used.
os.environ.pop("PREFECT_API_URL", None)
prepare_environment()

import gc  # noqa: E402
import hashlib  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from flowmill.configs.load import load_config  # noqa: E402
from flowmill.configs.schema import RunConfig  # noqa: E402
from flowmill.models.quickstart.build import DigitsBuilder  # noqa: E402
from flowmill.tasks.execution import launch  # noqa: E402
from flowmill.tasks.inputs.store_trust import remember  # noqa: E402
from flowmill.tasks.runs.context import RunContext  # noqa: E402
from tests.support.forked_ranks import ForkedAgent  # noqa: E402
from tests.support.inside import prepare, run_epoch  # noqa: E402
from tests.support.preloaded import READ_AT_IMPORT, run_forked  # noqa: E402
from tests.support.s3 import Server, named_or_moto  # noqa: E402
from tests.support.small import small_config, small_data, write_small  # noqa: E402

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
_PASSED = pytest.StashKey[bool]()
_LONGEST_ID = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-dir", default=None, help="folder of golden vectors; tests/golden/data when absent")
    parser.addoption("--golden-tokens", default=None, help="the same of tokens; tests/golden/tokens/data when absent")


def pytest_configure(config: pytest.Config) -> None:
    """Share servers among the processes of a test run, which inherit their address."""
    if not hasattr(config, "workerinput"):
        shared = Shared()
        os.environ[VARIABLE] = shared.address
        for name in _HOMES:
            config.add_cleanup(partial(shutil.rmtree, os.environ[name], ignore_errors=True))
        # Carried out last to first.
        config.add_cleanup(shared.close)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a long parameter by its begin and a digest: names go to every process, with every report."""
    if not isinstance(val, str | bytes) or len(val) <= _LONGEST_ID:
        return None
    data = val.encode(errors="surrogatepass") if isinstance(val, str) else val
    return f"{ascii(val[:_LONGEST_ID])[1:-1]}...{hashlib.blake2b(data, digest_size=4).hexdigest()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that use a server or fork commands as slow, and the parameters that ``slow_cases`` and
    ``campaign_cases`` name as their markers say."""
    unused: set[str] = set()
    used: set[str] = set()
    for item in items:
        if {"prefect_server", "preloaded", "s3_server"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
        for name in ("slow", "campaign"):
            for marker in item.iter_markers(f"{name}_cases"):
                cases = {f"{item.nodeid.partition('[')[0]}[{case}]" for case in marker.args}
                unused |= cases
                if item.nodeid.partition("@")[0] in cases:
                    used.add(item.nodeid.partition("@")[0])
                    item.add_marker(name)
    if unused - used and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"markers name parameters that no test has: {sorted(unused - used)}")


def pytest_collection_finish() -> None:
    """Leave what imports made out of every further search for garbage: it is most of all objects, and stays."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note whether a test passed."""
    report = yield
    item.stash[_PASSED] = item.stash.get(_PASSED, True) and report.passed
    return report


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that is emptied when its test has passed: those of all together would take gigabytes.

    The folder itself stays, so that no other test gets its name: libraries keep what they opened by its path.
    """
    yield tmp_path
    if request.node.stash.get(_PASSED, False):
        for path in tmp_path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    chosen = request.config.getoption("--golden-dir")
    return Path(chosen) if chosen else Path(__file__).parent / "golden" / "data"


@pytest.fixture(scope="session")
def tiny_base() -> Path:
    """A StableDiffusion3Pipeline folder with barely trained weights, of half the quickstart's blocks (two seconds)."""
    builder = DigitsBuilder(steps=20, vae_steps=20, images=500)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flowmill.models.quickstart.pipeline._LAYERS", 2)
        return once("tiny_base", lambda folder: builder.build(folder, lambda label, done, total: None))


ConfigFactory = Callable[..., RunConfig]


@pytest.fixture
def config_data(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    """A small run: 4 groups of 4, 3 steps, two epochs."""
    return small_data(tmp_path, tiny_base)


@pytest.fixture
def config_file(config_data: dict[str, Any], tmp_path: Path) -> Path:
    """The small run as a file, with its prompts."""
    return write_small(tmp_path, config_data)


@pytest.fixture
def make_config(config_file: Path) -> ConfigFactory:
    """Returns the small config with overrides; the small config itself counts as given on this machine."""

    def make(*overrides: str) -> RunConfig:
        remember(load_config(config_file))
        return load_config(config_file, overrides)

    return make


@pytest.fixture(scope="session")
def trained_store(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the small run after its two epochs, in two shards each; tests take copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    made = prepare(small_config(folder, tiny_base))
    for epoch in (1, 2):
        run_epoch(made, epoch)
    return folder / "store"


@pytest.fixture
def trained(trained_store: Path, make_config: ConfigFactory, tmp_path: Path) -> RunContext:
    """A copy of the small run after its two epochs, in a store of its own."""
    shutil.copytree(trained_store, tmp_path / "store", symlinks=True)
    return prepare(make_config())


@pytest.fixture(scope="session")
def prefect_server() -> str:
    """The URL of a real Prefect API server, shared by the tests that start many runs."""
    return where("prefect")


@pytest.fixture
def prefect_home(tmp_path: Path) -> Path:
    """A PREFECT_HOME of one's own, with the tables that a new server takes seconds to make."""
    folder = tmp_path / "prefect"
    folder.mkdir()
    shutil.copy(where("database"), folder / "prefect.db")
    return folder


@pytest.fixture(scope="session")
def preloaded() -> str:
    """Where command lines are carried out against the shared server."""
    return where("preloaded")


@pytest.fixture
def forked_ranks(preloaded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of runs in this process are forked instead of started: their imports take most of a small test's time."""
    monkeypatch.setattr(launch, "start_agent", partial(ForkedAgent, preloaded))


FlowmillCommand = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def flowmill(preloaded: str, prefect_server: str) -> FlowmillCommand:
    """Runs the command line as a process of its own, against the shared server."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PREFECT_API_URL": prefect_server, "COLUMNS": "200", **environment}
        differs = {name for name, value in environment.items() if os.environ.get(name) != value}
        if not any(name.startswith(READ_AT_IMPORT) for name in differs):
            return run_forked(preloaded, arguments, cwd=ROOT, env=variables, timeout=300)
        command = [sys.executable, "-m", "flowmill.flows.cli", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False
        )

    return run


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """A real S3 server: the one FLOWMILL_TEST_S3_ENDPOINT names, else moto's."""
    with named_or_moto() as server:
        yield server
