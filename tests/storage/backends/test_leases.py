"""Owners of leases and staging folders, recognized by host, machine, process namespace and start of the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowmill.configs.errors import RunConflictError, StoreError
from flowmill.configs.schema import StoreSection
from flowmill.storage.backends import lease as leases
from flowmill.storage.backends import process_tags
from flowmill.storage.backends.base import Staging
from flowmill.storage.backends.process_tags import is_gone, process_label, tag
from flowmill.storage.backends.s3 import S3Backend
from tests.conftest import ROOT
from tests.support.s3 import Faults, Server, make_bucket, unreliable, use

pytestmark = pytest.mark.slow

#: Takes a lease as a host of another name, says so, and holds it until its input ends; or ends at once.
HOLDER = """
import socket, sys
socket.gethostname = lambda: sys.argv[2]
from flowmill.configs.schema import StoreSection
from flowmill.storage.backends.s3 import S3Backend
root = S3Backend(sys.argv[1], StoreSection(root="s3://" + sys.argv[1]))
with root.lock("runs/x/.lock", "Run 'x'"):
    print("held", flush=True)
    if sys.stdin.readline() == "die\\n":
        import os
        os._exit(9)
"""


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    use(monkeypatch, {**s3_server.variables(), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    return make_bucket()


def root_of(bucket: str) -> S3Backend:
    return S3Backend(f"{bucket}/x", StoreSection(root=f"s3://{bucket}/x"))


@pytest.fixture
def holder(bucket: str, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lease as another host, or as this one."""
    command = [sys.executable, "-c", HOLDER, f"{bucket}/x", request.param]
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def die(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("die\n")
    process.stdin.flush()
    process.wait(30)


@pytest.mark.parametrize("holder", ["elsewhere"], indirect=True)
def test_another_hosts_lease_is_waited_for_by_the_servers_clock(
    bucket: str, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = root_of(bucket)
    with pytest.raises(RunConflictError, match=r"executed by another process \(elsewhere, pid \d+\)"), take(root):
        pass
    die(holder)
    with pytest.raises(RunConflictError, match="elsewhere"), take(root):
        pass
    monkeypatch.setattr(leases, "LEASE_S", 1.0)
    # This machine's own clock does not count.
    monkeypatch.setattr(time, "time", lambda: 0.0)
    time.sleep(2.5)
    with take(root):
        pass


def take(root: S3Backend) -> object:
    return root.lock("runs/x/.lock", "Run 'x'")


@pytest.mark.parametrize("holder", [os.uname().nodename], indirect=True)
def test_a_dead_process_of_this_machine_holds_nothing(bucket: str, holder: subprocess.Popen[str]) -> None:
    root = root_of(bucket)
    with pytest.raises(RunConflictError, match=f"pid {holder.pid}"), take(root):
        pass
    die(holder)
    with take(root):
        pass


def test_a_lease_that_was_taken_over_is_not_renewed_and_stops_commits(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.8)
    root = root_of(bucket)
    thief = json.dumps({"holder": "somebody"}).encode()
    with take(root):
        assert root.create("rewards/before", b"x")
        root._bucket.put("runs/x/.lock", thief)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and not root._leases[0]._lost:
            time.sleep(0.05)
        with pytest.raises(RunConflictError, match="was taken over by another process"):
            root.create("rewards/after", b"x")
    assert root.read("rewards/after") is None
    assert root.read("runs/x/.lock") == thief, "neither renewed nor removed by who lost it"
    assert root.create("rewards/after", b"x"), "without a lease there is none to lose"


REFUSALS = [
    StoreError("access is refused: the keys have expired"),
    RuntimeError("Credentials were refreshed, but the refreshed credentials are still expired."),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: type(each).__name__)
def test_a_failed_renewal_of_any_kind_is_tried_again(
    refusal: Exception, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 1.0)
    root = root_of(bucket)
    replace, refused, renewed = root._bucket.replace, list[float](), threading.Event()

    def unsteady(path: str, data: bytes, version: str) -> str | None:
        if len(refused) < 2:
            refused.append(time.monotonic())
            raise refusal
        renewed.set()
        return replace(path, data, version)

    monkeypatch.setattr(root._bucket, "replace", unsteady)
    with take(root):
        assert renewed.wait(20), f"{len(refused)} refused, and none was tried after that"
        assert root._leases[0]._keeper.is_alive()
        assert root.create("rewards/after", b"x")


def test_a_lease_that_ends_stops_commits_and_removals_until_it_is_renewed(
    s3_server: Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.8)
    faults = Faults(share=0.0, kinds=("403",))
    with unreliable(s3_server, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        root = root_of(bucket)
        with take(root):
            assert root.create("rewards/before", b"x")
            faults.share = 1.0
            time.sleep(1.0)
            for commits in (lambda: root.create("rewards/while", b"x"), lambda: root.remove("rewards/before")):
                with pytest.raises(StoreError, match=r"lease could not be renewed for 1 s .*access .* is refused"):
                    commits()
            faults.share = 0.0
            assert root.create("rewards/after", b"x"), "nobody took it in the meantime"
            faults.share = 1.0
            time.sleep(1.0)
            monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
            other = root_of(bucket)
            time.sleep(1.0)
            with take(other):
                faults.share = 0.0
                with pytest.raises(RunConflictError, match="was taken over by another process"):
                    root.create("rewards/late", b"x")
    assert [root.read(f"rewards/{name}") for name in ("before", "while", "after", "late")] == [b"x", None, b"x", None]


def test_a_lost_server_is_tried_for_a_limited_time_and_its_lease_is_left_to_end(
    s3_server: Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowmill.storage.backends.bucket._ATTEMPTS", 2)
    faults = Faults(share=0.0, kinds=("reset",))
    with unreliable(s3_server, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        root = root_of(bucket)
        with take(root):
            faults.share, root._leases[0]._ends, before = 1.0, 0.0, faults.requests
            with pytest.raises(ConnectionError):
                root.read("rewards/x")
    # Twice by the client, twice by what calls it, and aiohttp may repeat each: another layer would multiply them by 5.
    assert faults.requests - before <= 8


def test_a_lease_is_renewed_and_taken_over_where_versions_are_compared_without_quotes(
    s3_server: Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unreliable(s3_server, Faults(share=1.0, kinds=("quoted",))) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        bucketed = root_of(bucket)._bucket
        bucketed.put("lease", b"first")
        first = bucketed.metadata("lease")
        assert first is not None
        second = bucketed.replace("lease", b"second", first.version)
        assert second is not None
        assert bucketed.replace("lease", b"third", first.version) is None, "it is not the first any more"
        assert bucketed.get("lease") == b"second"
        before = bucketed.metadata("lease")
        time.sleep(2.1)  # times of objects are whole seconds
        assert bucketed.replace("lease", b"second", second) == second
        after = bucketed.metadata("lease")
        assert before is not None
        assert after is not None
        assert after.age_s < before.age_s + 2, "renewed, not taken for renewed"


def test_what_a_process_left_is_told_from_what_others_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tag()
    assert not is_gone(mine)
    host, machine, pid, _, number = mine.split("~")
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    began = process_tags._start(str(child.pid))
    child.wait()
    names = {
        "live": mine,
        "dead": "~".join((host, machine, str(child.pid), str(began), number)),
        "another of the same number": "~".join((host, machine, pid, "1", number)),
        "another container": "~".join((host, "0" * 12, str(child.pid), "1", number)),
        "another host": "~".join(("elsewhere", machine, str(child.pid), "1", number)),
        "of an earlier version": f"{host}-{child.pid}-{number}",
        "of anybody": "notes",
        "no number": "~".join((host, machine, "\u00b2", "1", number)),
    }
    assert {name for name, each in names.items() if is_gone(each)} == {"dead", "another of the same number"}
    assert process_label(mine) == f"{host}, pid {pid}"
    assert process_label("notes") == "unknown host and process"
    staging = Staging(tmp_path)
    for name in names.values():
        (staging.folder / name).mkdir()
    (staging.folder / f"{names['dead']}.tmp").write_text("")
    assert staging.sweep() == 3
    assert {entry.name for entry in staging.folder.iterdir()} == set(names.values()) - {
        names["dead"],
        names["another of the same number"],
    }
    old = time.time() - 8 * 86400
    for name in ("another host", "of anybody"):
        os.utime(staging.folder / names[name], (old, old))
    assert staging.sweep() == 1
    assert (staging.folder / "notes").exists(), "flowmill did not make it"
    (staging.folder / names["dead"]).mkdir()
    Staging(tmp_path)
    assert not (staging.folder / names["dead"]).exists(), "whoever writes next removes it"


def test_removing_a_folder_keeps_the_lease_in_it_until_it_is_released(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is given up is removed with its lease held; renewals would miss it, and stop all that follows."""
    monkeypatch.setattr(leases, "LEASE_S", 0.4)
    root = root_of(bucket)
    with root.lock("runs/x/.lock", "Run 'x'"):
        root.create("runs/x/run.json", b"{}")
        root.remove("runs/x")
        assert root.list("runs/x") == [".lock"]
        time.sleep(0.5)
        assert root.create("rewards/y", b"")
    assert root.list("runs") == []
