"""Servers that draw for one rollout: each draws a batch at a time, and another takes over if one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from configs.errors import EngineError
from models.engines.chains import Chain, ChainServer, Wanted
from models.serving.retry import PassingError, Patience


class Pool:
    """The servers of a rollout, for several threads."""

    def __init__(self, servers: Sequence[ChainServer], patience_s: float, note: Callable[[str], None]) -> None:
        """Begin with servers that are all free.

        Args:
            servers: the servers.
            patience_s: seconds of failures of all of them, after which the run stops.
            note: shows a message on a server that is left out from now on.
        """
        self._good, self._free = list(servers), list(servers)
        self._patience, self._note = Patience(patience_s), note
        self._changed = threading.Condition()

    def draw(self, wanted: Sequence[Wanted]) -> list[Chain]:
        """Return chains that one server drew; raise EngineError if none does for a while, or the answer of
        the last one cannot be used."""
        try:
            return self._patience.again(lambda: self.attempt(wanted))
        except PassingError as error:
            raise EngineError(
                f"rollout.engine: no server has answered for {self._patience.seconds:g} s; the last: {error}. See that "
                "'flowmill serve-rollout' runs there, or change its option 'servers'. Committed results stay, and "
                "nothing of this batch was stored: give the same command again."
            ) from None

    def attempt(self, wanted: Sequence[Wanted]) -> list[Chain]:
        """Return chains of the first server that answers; raise PassingError if none does, else as ``draw``."""
        failed: dict[int, PassingError] = {}
        while True:
            server = self._take(failed)
            if server is None:
                raise list(failed.values())[-1]
            try:
                server.ready()
                return server.chains(wanted)
            except PassingError as error:
                failed[id(server)] = PassingError(f"{server.url}: {error}", error.after_s)
            except EngineError as error:
                if not self._leave_out(server):
                    raise
                self._note(f"{error} Other servers go on without it.")
            finally:
                self._give_back(server)

    def _take(self, failed: Collection[int]) -> ChainServer | None:
        """Return a free server that has not failed, waiting for one; None if all have."""
        with self._changed:
            while True:
                if all(id(server) in failed for server in self._good):
                    return None
                for server in self._free:
                    if id(server) not in failed:
                        self._free.remove(server)
                        return server
                self._changed.wait()

    def _leave_out(self, server: ChainServer) -> bool:
        """Leave a server out; return False if it is the last."""
        with self._changed:
            if len(self._good) == 1:
                return False
            self._good.remove(server)
            return True

    def _give_back(self, server: ChainServer) -> None:
        with self._changed:
            if server in self._good:
                self._free.append(server)
            self._changed.notify_all()
