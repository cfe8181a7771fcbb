"""Rendezvous of torchrun's agents: one store, on one address.

torchrun's own rendezvous backends listen on every interface, and c10d's unpickles any received data. This one listens
only on the named address, and agents exchange only numbers; docs/reliability.md names trusted parties.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from flowmill.configs.addresses import is_address, is_loopback
from flowmill.configs.errors import ConfigError
from flowmill.tasks.runtime.background import in_background

#: Name for torchrun's --rdzv-backend.
BACKEND = "flowmill"
#: A scheduler may start agents one by one, minutes apart.
_TIMEOUT_S = 600.0
#: Seconds more for the answer of a store, which a TCPStore awaits without a limit.
_ANSWER_S = 30.0
#: Errors if another process or another machine has the address.
_TAKEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
_OTHERS = "another program has the port, maybe another run. Choose another endpoint in execution.launcher."


class Rendezvous(RendezvousHandler):
    """The store of one start of ranks: the agent that can listen at the endpoint creates it, the others connect."""

    def __init__(self, host: str, port: int, nodes: int, run_id: str, timeout_s: float = _TIMEOUT_S) -> None:
        """Store the settings; no socket listens yet.

        Args:
            host: name or address of one of the nodes.
            port: port of the store; 0 for any free port with a single node.
            nodes: number of agents.
            run_id: id of this start; agents with another id are ignored.
            timeout_s: seconds to wait for missing agents.
        """
        self._host, self._port, self._nodes, self._run_id = host, port, nodes, run_id
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Store | None = None

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: ranks use the agents' store and do not listen with their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store and return it, this agent's number and the number of agents.

        Raises:
            RendezvousConnectionError: no process can listen at the address, or there are more agents than nodes.
        """
        first = listening(self._host, self._port)
        if first is not None:
            self._port = first.getsockname()[1]
        elif self._nodes == 1:
            raise RendezvousConnectionError(
                f"{self._host}:{self._port} is no address of this node, or it is taken: {_OTHERS}"
            )
        self._store = self._opened(first)
        meeting = PrefixStore(self._run_id, self._store)
        number = 0 if first is not None else int(meeting.add("agents", 1))
        if number >= self._nodes:
            raise RendezvousConnectionError(
                f"More than {self._nodes} agents came to {self._host}:{self._port}, or it is taken: {_OTHERS}"
            )
        return RendezvousInfo(meeting, number, self._nodes, RendezvousStoreInfo(self._host, self._port))

    def _opened(self, first: socket.socket | None) -> Store:
        listener = None if first is None else first.detach()
        opened = in_background(lambda: self._open(listener), "rendezvous")
        try:
            return opened.result(self._timeout.total_seconds() + _ANSWER_S)
        except (RuntimeError, TimeoutError) as error:
            reason = str(error).partition("\n")[0] or "a program accepts connections and does not answer."
            raise RendezvousConnectionError(
                f"No rendezvous at {self._host}:{self._port}: {reason} The endpoint must be an "
                f"address of one of the nodes, with a free port. If it is taken, {_OTHERS}"
            ) from error

    def _open(self, listener: int | None) -> Store:
        """Return the store on a listening socket, or a connection to it."""
        return TCPStore(
            self._host,
            self._port,
            is_master=listener is not None,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def is_closed(self) -> bool:
        """False: ranks are started once, never again by torchrun."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no agent joins later."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of this start."""
        return self._run_id

    def shutdown(self) -> bool:
        """Release the store."""
        self._store = None
        return True


def make_rendezvous(parameters: RendezvousParameters) -> Rendezvous:
    """Return the rendezvous of torchrun's ``--rdzv-endpoint`` and ``--rdzv-id``."""
    host, _, port = parameters.endpoint.rpartition(":")
    nodes = parameters.max_nodes
    return Rendezvous(reachable(host, nodes), int(port), nodes, parameters.run_id)


def reachable(host: str, nodes: int) -> str:
    """Return an address of a host that other machines reach too, for a rendezvous of several machines.

    Debian maps a machine's own name to 127.0.1.1 in /etc/hosts, which others cannot reach; if the machine has a single
    other address, that one is returned. An explicit loopback host stays: all agents are on one machine.

    Raises:
        ConfigError: the name resolves only to loopback, and this machine has several addresses or none.
        OSError: the host is unknown.
    """
    if nodes == 1 or host == "localhost" or is_address(host):
        return host
    addresses = list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    others = [address for address in addresses if not is_loopback(address)]
    if others:
        return others[0]
    own = own_addresses()
    if len(own) == 1:
        return own[0]
    choice = f"has {', '.join(own)}: use the one that the others reach" if own else "has no other address"
    raise ConfigError(
        f"execution.launcher: the endpoint's host '{host}' is {' and '.join(addresses)} on this machine (a line of "
        f"/etc/hosts), which no other machine reaches. This machine {choice}."
    )


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine on interfaces that are up, which others may reach."""
    running = {name for name, state in psutil.net_if_stats().items() if state.isup}
    up = [
        each.address
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if name in running and each.family == socket.AF_INET
    ]
    return [each for each in up if not (is_loopback(each) or ipaddress.ip_address(each).is_link_local)]


def listening(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens only on one address; None if another process or machine has the address.

    Raises:
        OSError: listening or the lookup fails for another reason.
    """
    family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, number)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
        server.listen(socket.SOMAXCONN)
    except OSError as error:
        server.close()
        if error.errno in _TAKEN:
            return None
        raise
    return server


def stay_on_interface(host: str) -> None:
    """Restrict ranks to the interface that leads to the endpoint, unless the environment names another."""
    name = interface_to(host)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # Without the equals sign NCCL treats the name as a prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def interface_to(host: str) -> str | None:
    """Return the name of the interface that leads to a host; None if it is unknown.

    Raises:
        OSError: the host is unknown.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends no data: this only looks up the route.
        probe.connect(address)
        own: str = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    names = (name for name, addresses in interfaces if any(each.address.partition("%")[0] == own for each in addresses))
    return next(names, None)
