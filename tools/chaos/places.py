"""What runs depend on and can lose: servers, clusters, permissions, the clock; and runs that Prefect carries out.

A place is one class and one line of ``PLACES``: it starts what a run needs, and says what can be done to it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial

import psutil

from tests.support import clusters
from tests.support.s3 import Faults, free_port, make_bucket, named_or_moto, rclone, unreliable
from tools.chaos.place import Place, Run
from tools.chaos.prefect_places import Clock, LastingServer, TwoWorkers, Worker


class DaskCluster(Place):
    """A Dask scheduler with two workers."""

    def _begin(self) -> None:
        address, scheduler = clusters.dask_scheduler(self.environment)
        workers = [clusters.dask_worker(address, self.environment) for _ in range(2)]
        self._all = [self.keep(each) for each in (scheduler, *workers)]
        self.settings = (f"execution.runner={{name: dask, options: {{address: '{address}'}}}}",)
        self.disturbances = {
            "scheduler": lambda run: scheduler.kill(),
            "worker": lambda run: self.rng.choice(workers).family()[-1].kill(),
            "nanny": lambda run: self.rng.choice(workers).kill(),
        }

    def heal(self) -> None:
        """Start all again: workers of a lost scheduler may look for it for long."""
        for each in self._all:
            each.kill()
            each.start()


class RayCluster(Place):
    """A Ray cluster of two workers on one node."""

    def _begin(self) -> None:
        address, token, self._head = self.enter_context(clusters.ray_cluster(self.environment))
        self.variables = token
        self.settings = (f"execution.runner={{name: ray, options: {{address: '{address}'}}}}",)
        self.disturbances = {
            "head": lambda run: self._kill_some("gcs_server", run),
            "node": lambda run: self._kill_some("raylet", run),
            "worker": lambda run: self._kill_some("ray::", run),
        }

    def heal(self) -> None:
        """Start it again."""
        self._head.kill()
        self._head.start()

    def _kill_some(self, word: str, run: Run) -> None:
        killed = False
        for each in self._head.family():
            with contextlib.suppress(psutil.Error):
                if word in " ".join(each.cmdline()[:1]):
                    each.kill()
                    killed = True
        if not killed:
            # Workers come and go: there may be none at this moment.
            run.kill()


class LimitedBucket(Place):
    """A bucket whose server refuses requests: of some kind, of expired keys, of a wrong clock; or drops all."""

    def _begin(self) -> None:
        server = self.enter_context(named_or_moto())
        self._faults = Faults(0.0)
        endpoint = self.enter_context(unreliable(server, self._faults))
        _use(server.variables(endpoint), self)
        kinds = {"no list": "unlisted", "no delete": "undeleted", "expired keys": "403", "wrong clock": "skewed"}
        kinds["no answer"] = "reset"
        self.disturbances = {name: partial(self._refuse, kind) for name, kind in kinds.items()}

    def _refuse(self, kind: str, run: Run) -> None:
        self._faults.kinds, self._faults.share = (kind,), 1.0

    def heal(self) -> None:
        """Answer all requests."""
        self._faults.share = 0.0


class KilledBucket(Place):
    """A bucket on a disk, whose server is killed."""

    settings = ("store.single_writer=true",)

    def _begin(self) -> None:
        self._server = self.enter_context(contextlib.ExitStack())
        self._port = free_port()
        self.heal()
        self.disturbances = {"S3 server": lambda run: self._server.close()}

    def heal(self) -> None:
        """Start the server again at its address."""
        self._server.close()
        server = self._server.enter_context(rclone(self.folder, self._port))
        if not self.bucket:
            _use(server.variables(), self)


def _use(variables: dict[str, str], place: Place) -> None:
    """Use a bucket of a server here and in runs."""
    os.environ.update(variables)
    place.variables = {**variables, "XDG_CACHE_HOME": str(place.folder / "cache")}
    place.bucket = make_bucket()


PLACES: Mapping[str, type[Place]] = {
    "lasting server": LastingServer,
    "clock": Clock,
    "worker": Worker,
    "two workers": TwoWorkers,
    "Dask cluster": DaskCluster,
    "Ray cluster": RayCluster,
    "limited bucket": LimitedBucket,
    "killed bucket": KilledBucket,
}
