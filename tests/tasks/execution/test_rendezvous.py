"""Ranks meet on one address, and no process of a run listens anywhere else."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from flowmill.configs.errors import ConfigError
from flowmill.tasks.execution import rendezvous
from flowmill.tasks.execution.launch import Launched
from flowmill.tasks.execution.launchers import Agents, Launcher, Local, Program
from flowmill.tasks.execution.rendezvous import Rendezvous, interface_to, listening, reachable
from tests.tasks.execution.test_launch import free_port
from tools.chaos.kills import digest, start, uninterrupted

ROOT = Path(__file__).parents[3]
RANK = """
    import sys, time, torch
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record
    from flowmill.tasks.runtime.ranks import torchrun_ranks

    @record
    def main():
        with torchrun_ranks(torch.device("cpu"), 60, lambda beats: None) as ranks:
            dist.all_reduce(torch.ones(10))
            ranks.second_group().gather(ranks.rank)
            # In one piece: unbuffered as it is, print would write the end of the line by itself.
            sys.stdout.write("met\\n")
            time.sleep(600)

    main()
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, Launcher], Launched]:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (tmp_path / "rank_under_test.py").write_text(textwrap.dedent(RANK))
    return lambda nodes, each, launcher: Launched(
        Program(module="rank_under_test", nodes=nodes, processes=each), launcher
    )


def listened_at(pids: list[int]) -> Iterator[tuple[str, str]]:
    """Yield the address of every socket that processes and their descendants listen at, and who does."""
    family = [process for pid in pids for process in (psutil.Process(pid), *psutil.Process(pid).children(True))]
    for process in family:
        for connection in process.net_connections("all"):
            if connection.status == psutil.CONN_LISTEN and connection.family != socket.AF_UNIX:
                yield connection.laddr.ip, " ".join(process.cmdline())


@pytest.mark.campaign_cases("1")
@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_listen_on_loopback_alone(ranks: Callable[[int, int, Launcher], Launched], nodes: int) -> None:
    meeting = Agents(endpoint=f"127.0.0.1:{free_port()}", prefixes=((), ())) if nodes > 1 else Local()
    launched = ranks(nodes, 2 // nodes, meeting)
    try:
        met = (line for line in launched.lines(1) if line == "met")
        assert [next(met), next(met)] == ["met", "met"]
        found = list(listened_at(launched.pids))
    finally:
        launched.stop()
    # The agents' store, and a channel or two of each rank.
    assert len(found) >= 3
    assert [who for address, who in found if not ipaddress.ip_address(address).is_loopback] == []


def test_agents_are_numbered_and_strangers_refused() -> None:
    port = free_port()
    found: list[int] = []
    agents = [Rendezvous("127.0.0.1", port, 3, "start", 20) for _ in range(3)]
    first = agents[0].next_rendezvous()
    threads = [threading.Thread(target=lambda a=a: found.append(a.next_rendezvous().rank)) for a in agents[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert first.rank == 0
    assert sorted(found) == [1, 2]
    assert first.world_size == 3
    with pytest.raises(RendezvousConnectionError, match="More than 3 agents"):
        Rendezvous("127.0.0.1", port, 3, "start", 20).next_rendezvous()
    # Of another start: numbered again.
    assert Rendezvous("127.0.0.1", port, 2, "next", 20).next_rendezvous().rank == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_endpoint_of_another_run_is_named(nodes: int) -> None:
    port = free_port()
    first = Rendezvous("127.0.0.1", port, nodes, "first", 20)
    assert first.next_rendezvous().rank == 0
    agents = [Rendezvous("127.0.0.1", port, nodes, "second", 20) for _ in range(nodes)]
    assert [each.next_rendezvous().rank for each in agents[:-1]] == [1] * (nodes - 1)
    with pytest.raises(RendezvousConnectionError, match=r"is taken: .*another run\. Choose another endpoint"):
        agents[-1].next_rendezvous()


@pytest.mark.parametrize(
    ("nodes", "message"),
    [(1, "is no address of this node, or it is taken"), (2, "No rendezvous at .*one of the nodes")],
)
def test_an_endpoint_of_nobody_is_named(nodes: int, message: str) -> None:
    # An address of no machine (RFC 5737): nobody can listen there.
    with pytest.raises(RendezvousConnectionError, match=message):
        Rendezvous("192.0.2.1", 29500, nodes, "start", 1).next_rendezvous()


def test_a_program_that_does_not_answer_at_the_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        agent = Rendezvous("127.0.0.1", silent.getsockname()[1], 2, "start", 0.5)
        with pytest.raises(RendezvousConnectionError, match=r"does not answer\. .*Choose another endpoint"):
            agent.next_rendezvous()


def test_a_socket_listens_at_its_address_alone() -> None:
    found = listening("127.0.0.1", 0)
    assert found is not None
    port = found.getsockname()[1]
    assert listening("127.0.0.1", port) is None, "taken"
    with socket.socket() as other:
        other.settimeout(2)
        # Every address of 127.0.0.0/8 is this machine's, and this one is not listened at.
        assert other.connect_ex(("127.0.0.2", port)) == errno.ECONNREFUSED
    found.close()


def test_ranks_keep_to_the_interface_of_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowmill.tasks.execution.rendezvous import stay_on_interface

    assert interface_to("127.0.0.1") in psutil.net_if_addrs()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    stay_on_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_to("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0", "the user's own stays"


def known_as(monkeypatch: pytest.MonkeyPatch, **machines: list[str]) -> None:
    """Let names stand for addresses, as /etc/hosts and DNS say."""

    def found(host: str, port: int | None, **how: object) -> list[tuple[object, ...]]:
        if host not in machines:
            raise socket.gaierror(f"{host} is not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0)) for address in machines[host]]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def has(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let this machine have interfaces with addresses, and one that is down."""
    own = {f"eth{n}": [SimpleNamespace(address=each, family=socket.AF_INET)] for n, each in enumerate(addresses)}
    own |= {"lo": [SimpleNamespace(address="127.0.0.1", family=socket.AF_INET)]}
    own |= {"ib0": [SimpleNamespace(address="10.9.9.9", family=socket.AF_INET)]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: own)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "ib0") for name in own})


def test_a_name_that_stands_for_loopback_is_resolved_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's ``127.0.1.1 node1``: with what DNS says, else with the one address this machine has."""
    known_as(monkeypatch, node1=["127.0.1.1"], node2=["10.0.0.2"], both=["127.0.1.1", "10.0.0.1"])
    has(monkeypatch, "10.0.0.7", "169.254.3.3")
    assert reachable("node2", 2) == "10.0.0.2"
    assert reachable("both", 2) == "10.0.0.1"
    assert reachable("node1", 2) == "10.0.0.7"
    # One machine keeps to itself, and loopback that is written as such is meant.
    assert reachable("node1", 1) == "node1"
    assert reachable("127.0.0.1", 2) == "127.0.0.1"
    assert reachable("localhost", 2) == "localhost"
    assert reachable("10.1.2.3", 2) == "10.1.2.3"


@pytest.mark.parametrize(
    ("addresses", "reported"),
    [(["10.0.0.7", "192.168.1.7"], "has 10.0.0.7, 192.168.1.7: use the one"), ([], "has no other address")],
)
def test_a_name_that_stands_for_loopback_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], reported: str
) -> None:
    known_as(monkeypatch, node1=["127.0.1.1"])
    has(monkeypatch, *addresses)
    with pytest.raises(ConfigError, match=r"the endpoint's host 'node1' is 127\.0\.1\.1 on this machine") as refused:
        reachable("node1", 2)
    assert reported in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.1.1"])
@pytest.mark.parametrize("away", [("ssh", "node2"), ("srun", "--nodes=2"), ("kubectl", "exec")])
def test_loopback_is_no_endpoint_of_other_machines(host: str, away: tuple[str, ...], tmp_path: Path) -> None:
    program = Program(module="m", nodes=2)
    with pytest.raises(ConfigError, match=f"but '{away[0]}' starts agents on others"):
        Agents(endpoint=f"{host}:29500", prefixes=((), away)).commands(program, tmp_path)
    assert Agents(endpoint=f"{host}:29500", prefixes=((), ("env", "A=b"))).commands(program, tmp_path)


def cable(number: int) -> str:
    """Return the name of a machine's end of the cable."""
    return f"f{'ab'[number]}{os.getpid()}"


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them; each knows its own name as 127.0.1.1, as Debian writes it."""
    names, ends = (f"flowmill{os.getpid()}a", f"flowmill{os.getpid()}b"), (cable(0), cable(1))
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("namespaces take root and iproute2")
    if subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no network namespaces")
    try:
        for line in (f"netns add {names[1]}", f"link add {ends[0]} type veth peer name {ends[1]}"):
            subprocess.run(["ip", *line.split()], check=True)
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            for line in (f"link set {end} netns {name}", f"-n {name} addr add 10.77.0.{number}/24 dev {end}"):
                subprocess.run(["ip", *line.split()], check=True)
            for up in (end, "lo"):
                subprocess.run(["ip", "-n", name, "link", "set", up, "up"], check=True)
            other = f"10.77.0.{3 - number} node{3 - number}"
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{number}\n{other}\n")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.mark.campaign
def test_machines_meet_whose_own_names_are_loopback(
    ranks: Callable[[int, int, Launcher], Launched], machines: tuple[str, str]
) -> None:
    prefixes = tuple(("ip", "netns", "exec", name) for name in machines)
    launched = ranks(2, 1, Agents(endpoint="node1:29500", prefixes=prefixes))
    try:
        met = (line for line in launched.lines(60) if line in ("met", None))
        assert [next(met), next(met)] == ["met", "met"]
    finally:
        launched.stop()


def cut_off(machine: str, number: int) -> None:
    """Pull a machine's cable, so that nothing tells the other one, and end all that runs on it."""
    subprocess.run(["ip", "-n", machine, "link", "set", cable(number), "down"], check=True)
    found = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, text=True, check=True).stdout
    for pid in map(int, found.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(1)
    subprocess.run(["ip", "-n", machine, "link", "set", cable(number), "up"], check=True)


@pytest.mark.campaign
def test_a_run_on_two_machines_survives_the_loss_of_each(
    config_file: Path, tmp_path: Path, prefect_server: str, machines: tuple[str, str]
) -> None:
    """The digest is that of a run with two ranks on one machine that nobody killed."""
    data = yaml.safe_load(config_file.read_text())
    data["optimize"] |= {"updates_per_epoch": 4, "inner_epochs": 8}
    data["evaluate"]["every"] = 2
    data["execution"] |= {"checkpoint_every": 1, "processes": 2}
    config_file.write_text(yaml.safe_dump(data))
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    expected = uninterrupted(str(config_file), str(tmp_path / "one"), environment)
    prefixes = [["ip", "netns", "exec", name] for name in machines]
    launcher = {"name": "agents", "options": {"endpoint": "node1:29500", "prefixes": prefixes}}
    data["execution"] |= {"processes": 1, "nodes": 2, "launcher": launcher}
    config_file.write_text(yaml.safe_dump(data))
    root = tmp_path / "two"
    process = start(["run", str(config_file), "--root", str(root)], environment)
    try:
        # The one they meet at last.
        for epoch, victim in ((1, 1), (2, 0)):
            while not in_the_middle(root, epoch):
                assert process.poll() is None, process.communicate()[0].decode()
                time.sleep(0.01)
            cut_off(machines[victim], victim)
            assert in_the_middle(root, epoch)
        output = process.communicate(timeout=300)[0].decode()
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert output.count("The ranks are started again") == 2
    assert digest(str(root), "small", environment) == expected


def in_the_middle(root: Path, epoch: int) -> bool:
    """Return whether an epoch's training has made a checkpoint and not ended."""
    done = {path.parent for path in root.glob("policies/*/manifest.json")}
    # A policy's own checkpoints go only after it is complete.
    begun = {path.parents[1] for path in root.glob("policies/*/_checkpoints/*.json")}
    return len(done) == epoch and bool(begun - done)
