"""Kills of one kind of command: at random moments, again and again, and a comparison with one that ran undisturbed."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import list_runs
from tools.chaos.kills import digest, orphans, start, victims
from tools.chaos.losses import unseen
from tools.chaos.place import ENDS_S, Place, Run
from tools.chaos.tending import Tending

#: Kills after which a run may finish.
LIVES = 5
#: Signals for each kind of process; SIGKILL for all others.
_SIGNALS = {kind: [signal.SIGKILL, signal.SIGTERM] for kind in ("parent", "group")}
#: Processes that a run starts again by itself.
_REPLACED = ("agent", "rank", "Dask worker")
#: Seconds after which nothing of a killed run may be alive.
_GONE_S = 20.0
#: Seconds after which a run counts as one that waits forever.
_LONGEST_S = 900.0
RUN = "small"


@dataclass
class Outcome:
    """Outcome of the runs of one shape."""

    kills: Counter[str] = field(default_factory=Counter)
    """By target."""
    tended: Counter[str] = field(default_factory=Counter)
    """Damage done to its stores in between."""
    finished: int = 0
    """Runs that went on to the end."""
    wrong: list[str] = field(default_factory=list)
    """Deviations."""

    @property
    def total(self) -> int:
        """Kills in all."""
        return sum(self.kills.values())


@dataclass(frozen=True)
class Expected:
    """The result of an uninterrupted run."""

    digest: str
    curves: Any
    seconds: float


class Campaign:
    """Runs of one shape."""

    def __init__(self, config: Path, rng: random.Random, environment: Mapping[str, str], *, bucket: bool) -> None:
        """Bind to a config; stores are next to it.

        Args:
            config: the config of the shape.
            rng: draws moments and victims.
            environment: of the runs.
            bucket: stores are in a bucket.
        """
        self._folder, self._rng = config.parent, rng
        self._environment = {**environment, "FLOWMILL_TEST": str(self._folder)}
        self._bucket, self.config = bucket, str(config)

    def expected(self) -> Expected:
        """Run to the end without a kill."""
        begun = time.monotonic()
        root = self._root("whole")
        self._finish(root)
        return Expected(self._digest(root), self._curves(root), time.monotonic() - begun)

    def kill(self, expected: Expected, kills: int, *, tend: bool = False) -> Outcome:
        """Kill so many times, let runs finish in between, and compare them.

        Args:
            expected: their results.
            kills: how many times.
            tend: damage, repair and clear up the store after each.
        """
        tending = Tending(self._rng, self._environment)
        outcome, number = Outcome(tended=tending.done), 0
        while outcome.total < kills:
            number += 1
            root, wanted = self._root(f"killed-{number}"), min(kills, outcome.total + LIVES)
            try:
                while outcome.total < wanted and self._killed_once(root, expected.seconds, outcome):
                    if tend:
                        outcome.wrong += tending.tend(Path(root))
                self._finish(root)
            except SystemExit as error:
                outcome.wrong.append(f"run {number}: {error}")
                continue
            outcome.finished += 1
            if self._digest(root) != expected.digest:
                outcome.wrong.append(f"digest of run {number}")
            if self._curves(root) != expected.curves:
                outcome.wrong.append(f"curves of run {number}")
        return outcome

    def damage(self, outcome: Outcome, tries: int, seed: int) -> None:
        """Damage so many files of the store of the whole run, one after the other, which ``verify`` has to see."""
        if self._bucket:
            return
        outcome.tended["damaged"] += tries
        outcome.wrong += [f"not seen: {each}" for each in unseen(Path(self._root("whole")), tries=tries, seed=seed)]

    def _killed_once(self, root: str, seconds: float, outcome: Outcome) -> bool:
        """Start the run and kill something of it at a random moment; False if it was finished before."""
        process = self._start(root)
        try:
            process.wait(self._rng.random() * seconds)
        except subprocess.TimeoutExpired:
            found = victims(process.pid)
            kind = self._rng.choice(list(found))
            number = self._rng.choice(_SIGNALS.get(kind, [signal.SIGKILL]))
            # All of a group, one of the others.
            for victim in found[kind] if kind == "group" else [self._rng.choice(found[kind])]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(number)
            outcome.kills[kind if number == signal.SIGKILL else f"{kind} asked"] += 1
            if kind in _REPLACED:
                ended = _ended(process)[0] != 0
                if ended:
                    outcome.wrong.append(f"a killed {kind} ended the run")
                return not ended
            if kind == "server" and not self._stops(process):
                outcome.wrong.append(f"a run whose server was killed ended after more than {_GONE_S:g} s")
            _ended(process)
            if not self._gone():
                outcome.wrong.append(f"processes of a killed {kind} after {_GONE_S:g} s")
            return True
        return False

    def _stops(self, process: Run) -> bool:
        """Return whether a run whose server is gone ends within some seconds, or else goes on to its end."""
        try:
            process.communicate(timeout=_GONE_S)
        except subprocess.TimeoutExpired:
            return _ended(process)[0] == 0
        return True

    def _gone(self) -> bool:
        """Return whether nothing of the runs lives, within some seconds."""
        deadline = time.monotonic() + _GONE_S
        while orphans(self._environment["FLOWMILL_TEST"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _start(self, root: str) -> Run:
        return start(self._command(root), self._environment)

    def _finish(self, root: str) -> None:
        process = self._start(root)
        code, said = _ended(process)
        if code:
            raise SystemExit(f"{self.config} could not be continued:\n{said}")

    def _root(self, name: str) -> str:
        if not self._bucket:
            return str(self._folder / name)
        return f"s3://{self._environment['FLOWMILL_TEST_BUCKET']}/{name}"

    def _command(self, root: str) -> list[str]:
        return ["run", self.config, "--root", root, "--quiet"]

    def _runs(self, root: str) -> Sequence[str]:
        return [RUN]

    def _digest(self, root: str) -> str:
        return " ".join(digest(root, name, self._environment) for name in self._runs(root))

    def _curves(self, root: str) -> Any:
        return {name: self._points(root, name) for name in self._runs(root)}

    def _points(self, root: str, run: str) -> Any:
        """Return every point of every metric that does not measure time, in order: a double would be seen."""
        from flowmill.tasks.runs.opening import open_run
        from flowmill.tasks.tracking.client import open_client

        note = open_run(root, run, reads=True).run.newest("tracking")
        assert note is not None
        client = open_client(root, None)
        names = client.get_run(note["mlflow_run_id"]).data.metrics
        histories = {name: client.get_metric_history(note["mlflow_run_id"], name) for name in names}
        return {
            name: sorted((point.step, point.value) for point in points)
            for name, points in sorted(histories.items())
            if not name.startswith(("time/", "system/"))
        }


class Disturbed(Campaign):
    """Runs that lose something of the place where they run, and continue when it is there again."""

    def __init__(self, config: Path, rng: random.Random, environment: Mapping[str, str], *, place: Place) -> None:
        """Bind to a config and a place."""
        bucket = {"FLOWMILL_TEST_BUCKET": place.bucket}
        super().__init__(config, rng, {**environment, **bucket, **place.variables}, bucket=bool(place.bucket))
        self._place = place

    def _start(self, root: str) -> Run:
        return self._place.start(self._command(root), self._environment)

    def _finish(self, root: str) -> None:
        super()._finish(root)
        wrong = self._place.left()
        if wrong:
            raise SystemExit(", ".join(wrong))

    def _killed_once(self, root: str, seconds: float, outcome: Outcome) -> bool:
        run = self._start(root)
        try:
            run.wait(self._rng.random() * seconds)
        except subprocess.TimeoutExpired:
            kind = self._place.disturb(run)
            outcome.kills[kind] += 1
            try:
                said = run.communicate(timeout=ENDS_S)[0].decode()
            except subprocess.TimeoutExpired:
                outcome.wrong.append(f"a run waits for ever after: {kind}")
                run.kill()
            else:
                if "Traceback" in said or (run.returncode > 0 and "flowmill: " not in said):
                    outcome.wrong.append(f"after {kind}, a run ends with {run.returncode}: {said[-600:]}")
            self._place.heal()
            if not self._gone():
                outcome.wrong.append(f"processes of a run after: {kind}")
            return True
        return False


class Sweeps(Campaign):
    """Sweeps of two variants, in two processes."""

    def _command(self, root: str) -> list[str]:
        grid = ["--grid", "optimize.learning_rate=0.001,0.002", "--parallel", "2"]
        out = ["--out", str(self._folder / "report.html"), "--quiet"]
        return ["sweep", self.config, "--name", RUN, *grid, "--root", root, *out]

    def _runs(self, root: str) -> Sequence[str]:
        return list_runs(ArtifactStore(root))

    def _stops(self, process: Run) -> bool:
        # It goes on with the other variant, and fails at the end.
        _ended(process)
        return True


def _ended(process: Run) -> tuple[int, str]:
    """Wait for the end of a run; return its exit code and output."""
    try:
        said = process.communicate(timeout=_LONGEST_S)[0].decode()
    except subprocess.TimeoutExpired:
        process.kill()
        raise SystemExit(f"it did not end within {_LONGEST_S:g} s") from None
    return process.returncode, said
