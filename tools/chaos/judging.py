"""Kills of ``flowmill reward fit``, and of ``flowmill rate`` between and during answers."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from pathlib import Path

import httpx
import yaml

from flowmill.configs.load import parse_config
from flowmill.configs.schema import StoreSection
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.maintenance.verify import list_refs
from flowmill.tasks.ratings.answers import answers_of, commit_preferences
from tests.support.inside import prepare, run_epoch
from tests.support.judged import fit_config, write_pairs
from tests.support.serving import Server
from tests.support.small import small_data, write_small
from tools.chaos.killing import LIVES, RUN, Campaign, Expected, Outcome

_CHOICES = ("left", "right", "tie", "skip")
#: Answers of one rater; the rest of the pairs stays.
_ANSWERS = 100


def write_fit(folder: Path) -> Path:
    """Write a config of a fit on preferences for images."""
    config = fit_config(folder, write_pairs(folder / "judged", 120), updates=40)
    path = folder / "fit.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude={"store"})))
    return path


class Fits(Campaign):
    """Fits of a reward."""

    def _command(self, root: str) -> list[str]:
        return ["reward", "fit", self.config, "--root", root, "--json"]

    def _digest(self, root: str) -> str:
        """Return id and files of the one reward model of a store."""
        store = ArtifactStore(StoreSection(root=root))
        (ref,) = (each for each in list_refs(store) if each.kind == "reward_models")
        return f"{ref} {[record.digest for record in store.shards(ref)]}"

    def _curves(self, root: str) -> None:
        """There are none."""


def write_rated(folder: Path, base: Path) -> Path:
    """Make a run with enough samples of a rollout to compare."""
    data = small_data(folder, base)
    data["run"] |= {"name": RUN, "epochs": 1}
    data["rollout"] |= {"prompts_per_epoch": 8, "group_size": 14}
    path = write_small(folder, data)
    run_epoch(prepare(parse_config(data, where="the rated run")), 1)
    return path


class Ratings(Campaign):
    """Ratings of one rater, who answers a hundred pairs by a rule."""

    def expected(self) -> Expected:
        """Answer all pairs without a kill."""
        begun, root = time.monotonic(), self._fresh("whole")
        self._rate(root)
        return Expected(self._digest(root), None, time.monotonic() - begun)

    def _command(self, root: str) -> list[str]:
        return [RUN, "--root", root, "--epoch", "1", "--rater", "ann", "--pairs", str(_ANSWERS)]

    def kill(self, expected: Expected, kills: int, *, tend: bool = False) -> Outcome:
        """Kill the server during answers, and compare every acknowledged answer, and the preferences at the end."""
        outcome = Outcome()
        while outcome.total < kills:
            root = self._fresh(f"killed-{outcome.finished}")
            for at in sorted(self._rng.sample(range(_ANSWERS), min(LIVES, kills - outcome.total))):
                known = self._rate(root, kill_at=at)
                outcome.kills["server"] += 1
                found = len(answers_of(RunFolder(ArtifactStore(root), RUN)))
                # An answer that was under way may be stored or not; one that was acknowledged is.
                if found not in (known, known + 1):
                    outcome.wrong.append(f"{found} answers after {known} acknowledged ones")
            self._rate(root)
            outcome.finished += 1
            if self._digest(root) != expected.digest:
                outcome.wrong.append(f"preferences of run {outcome.finished}")
        return outcome

    def _digest(self, root: str) -> str:
        """Return the artifact of all answers."""
        return str(commit_preferences(RunFolder(ArtifactStore(root), RUN)))

    def _fresh(self, name: str) -> str:
        """Return a copy of the store, without answers."""
        return str(shutil.copytree(self._folder / "store", self._folder / name))

    def _rate(self, root: str, *, kill_at: int | None = None) -> int:
        """Answer all pairs by a rule; return the number of acknowledged answers.

        Args:
            root: the store.
            kill_at: number of answers after which the server is killed, while it takes the next ones.
        """
        server = Server(self._command(root), environment=dict(self._environment), name="rate")
        server.start()
        known = 0
        try:
            with httpx.Client(base_url=server.url) as client, contextlib.suppress(httpx.TransportError):
                state = client.get("/api/group", params={"rater": "ann"}).raise_for_status().json()
                while (known := state["done"]) < _ANSWERS:
                    if known == kill_at:
                        threading.Timer(self._rng.random() * 0.05, server.kill).start()
                    name = state["group"]["name"]
                    body = {"group": name, "rater": "ann", "choice": _CHOICES[int(name, 16) % 4], "seconds": 1.0}
                    state = client.post("/api/answer", json=body).raise_for_status().json()
        finally:
            server.kill()
        return known
