"""Kills runs of every shape from their first second on, continues them, and compares digest and MLflow's curves.

``python -m tools.chaos.campaign --kills 500 --seed 0`` prints one table. A run is killed as a whole (its process
group), or its parent, its Prefect server, torchrun's agent or a rank alone; its group and its parent also get SIGTERM
("asked"). After each nothing of it may be alive 20 seconds later. After some kills a run may finish, and is compared
with one that nobody killed.

With ``--tend`` a file of the store is damaged after each kill, and ``store verify``, ``repair`` and ``gc``, some of
them killed too, have it as it was before the run goes on (``tools.chaos.tending``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flows.environment import prepare_environment
from tests.support.given import pairs, write_jsonl
from tests.support.language_models import drawn_texts_data, texts_data
from tests.support.small import small_data, write_small
from tests.support.vision_classes import vision_data
from tools.chaos.kills import digest, orphans, start, victims
from tools.chaos.tending import Tending

_AVERAGE = "optimize.ema={decay: 0.9}"
SHAPES: Mapping[str, Sequence[str]] = {
    "grpo": (),
    "checkpoints": ("optimize.updates_per_epoch=4", "execution.checkpoint_every=1"),
    "branch": (
        "rollout.plan={name: branch, options: {branches: 2}}",
        "optimize.algorithm={name: tempflow, options: {clip_range: 0.002}}",
    ),
    "nft, average": ("rollout.plan={name: final}", "optimize.algorithm={name: nft}", _AVERAGE),
    "replay": ("optimize.replay={epochs: 1}",),
    "parquet": ("rollout.store=parquet",),
    "lora": ("model.lora={rank: 2, alpha: 4}",),
    "two ranks": ("execution.processes=2", "optimize.updates_per_epoch=2", "execution.checkpoint_every=1"),
    "video": ("VIDEO",),
    "texts": ("TEXTS", "optimize.algorithm=grpo"),
    "images": ("IMAGES", "optimize.algorithm=grpo", "execution.checkpoint_every=1"),
    "critic": (
        "TEXTS",
        "optimize.algorithm=ppo",
        "advantage.estimator.options={kl_coef: 0.1, target_kl: 0.01, horizon: 64}",
        "execution.checkpoint_every=1",
    ),
    "render": ("DRAWN", "execution.checkpoint_every=1"),
    "given": ("GIVEN", "optimize.algorithm={name: dpo, options: {times: {count: 2}}}", "execution.checkpoint_every=1"),
    "gradient": (
        "rewards=[{name: digits_network}]",
        "rollout.plan={name: final}",
        "optimize.algorithm={name: reward_gradient}",
        "execution.checkpoint_every=1",
    ),
    "fsdp": (
        "execution.processes=2",
        "execution.strategy=fsdp",
        "optimize.updates_per_epoch=2",
        "execution.checkpoint_every=1",
    ),
    "s3": ("S3",),
    # Models, groups and batches as large as people train them, for fewer epochs; a base model that is made once.
    "addition_ppo": ("PRESET", "run.epochs=3", "evaluate.every=3", "critic.alone_epochs=1"),
    "addition_grpo": ("PRESET", "run.epochs=3", "evaluate.every=3"),
}
#: Kills after which a run may finish.
_LIVES = 5
#: Signals for each kind of process; SIGKILL for all others.
_SIGNALS = {kind: [signal.SIGKILL, signal.SIGTERM] for kind in ("parent", "group")}
#: Seconds after which nothing of a killed run may be alive.
_GONE_S = 20.0
RUN = "small"
_LINE = "{:13} {:>5}  {:50} {:>4}  {}\n"


@dataclass
class Outcome:
    """What became of the runs of one shape."""

    kills: Counter[str] = field(default_factory=Counter)
    """By what was killed."""
    tended: Counter[str] = field(default_factory=Counter)
    """What was done to its stores in between."""
    finished: int = 0
    """Runs that went on to the end."""
    wrong: list[str] = field(default_factory=list)
    """What was not as it should be."""

    @property
    def total(self) -> int:
        """Kills in all."""
        return sum(self.kills.values())


@dataclass(frozen=True)
class Expected:
    """What an uninterrupted run comes to."""

    digest: str
    curves: Any
    seconds: float


class Campaign:
    """Runs of one shape."""

    def __init__(self, name: str, folder: Path, base: Path, rng: random.Random, environment: Mapping[str, str]) -> None:
        """Write the config of a shape.

        Args:
            name: the shape.
            folder: for its config and stores.
            base: pipeline of the tiny model.
            rng: draws moments and victims.
            environment: of the runs.
        """
        self._folder, self._rng = folder, rng
        self._environment = {**environment, "FLOWMILL_TEST": str(folder)}
        self._bucket = name == "s3"
        self.config = str(_write(name, folder, base))

    def expected(self) -> Expected:
        """Run to the end without a kill."""
        begun = time.monotonic()
        root = self._root("whole")
        self._finish(root)
        return Expected(digest(root, RUN, self._environment), self._curves(root), time.monotonic() - begun)

    def kill(self, expected: Expected, kills: int, *, tend: bool = False) -> Outcome:
        """Kill so many times, let runs finish in between, and compare them.

        Args:
            expected: what they come to.
            kills: how many times.
            tend: damage, repair and clear up the store after each.
        """
        tending = Tending(self._rng, self._environment)
        outcome, number = Outcome(tended=tending.done), 0
        while outcome.total < kills:
            number += 1
            root, wanted = self._root(f"killed-{number}"), min(kills, outcome.total + _LIVES)
            while outcome.total < wanted and self._killed_once(root, expected.seconds, outcome):
                if tend:
                    outcome.wrong += tending.tend(Path(root))
            try:
                self._finish(root)
            except SystemExit as error:
                outcome.wrong.append(f"run {number}: {error}")
                continue
            outcome.finished += 1
            if digest(root, RUN, self._environment) != expected.digest:
                outcome.wrong.append(f"digest of run {number}")
            if self._curves(root) != expected.curves:
                outcome.wrong.append(f"curves of run {number}")
        return outcome

    def _killed_once(self, root: str, seconds: float, outcome: Outcome) -> bool:
        """Start the run and kill something of it at a random moment; False if it was finished before."""
        process = start(["run", self.config, "--root", root, "--quiet"], self._environment)
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
            if kind in ("agent", "rank"):
                # It is started again by the run itself.
                return True if _ended(process) == 0 else bool(outcome.wrong.append(f"a killed {kind} ended the run"))
            if kind == "server" and not _stops(process):
                outcome.wrong.append(f"a run whose server was killed ended after more than {_GONE_S:g} s")
            _ended(process)
            if not self._gone():
                outcome.wrong.append(f"processes of a killed {kind} after {_GONE_S:g} s")
            return True
        return False

    def _gone(self) -> bool:
        """Return whether nothing of the runs lives, within some seconds."""
        deadline = time.monotonic() + _GONE_S
        while orphans(self._environment["FLOWMILL_TEST"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _finish(self, root: str) -> None:
        process = start(["run", self.config, "--root", root, "--quiet"], self._environment)
        said = process.communicate(timeout=1200)[0].decode()
        if process.returncode:
            raise SystemExit(f"{self.config} could not be continued:\n{said}")

    def _root(self, name: str) -> str:
        if not self._bucket:
            return str(self._folder / name)
        return f"s3://{self._environment['FLOWMILL_TEST_BUCKET']}/{name}"

    def _curves(self, root: str) -> Any:
        """Return every point of every metric that does not measure time, in order: a double would be seen."""
        from tasks.runs.opening import open_run
        from tasks.tracking.client import open_client

        note = open_run(root, RUN, reads=True).run.newest("tracking")
        assert note is not None
        client = open_client(root, None)
        names = client.get_run(note["mlflow_run_id"]).data.metrics
        histories = {name: client.get_metric_history(note["mlflow_run_id"], name) for name in names}
        return {
            name: sorted((point.step, point.value) for point in points)
            for name, points in sorted(histories.items())
            if not name.startswith(("time/", "system/"))
        }


def _ended(process: subprocess.Popen[bytes]) -> int:
    process.communicate(timeout=1200)
    return process.returncode


def _stops(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a run whose server is gone ends within some seconds, or else goes on to its end."""
    try:
        process.communicate(timeout=_GONE_S)
    except subprocess.TimeoutExpired:
        return _ended(process) == 0
    return True


def _write(name: str, folder: Path, base: Path) -> Path:
    """Write the config of a shape, and its prompts."""
    from configs.load import dump_yaml, load_config
    from models.quickstart.addition import AdditionBuilder

    settings = ["run.epochs=3", f"run.name={RUN}"]
    given = [each for each in SHAPES[name] if not each.isupper()]
    if name == "video":
        config = load_config(Path("configs/tiny_wan21.yaml"), [*settings, "evaluate.every=1"])
    elif "PRESET" in SHAPES[name]:
        model = folder / "model"
        AdditionBuilder().build(model, lambda what, done, total: None)
        own = f"model={{policy: causal_lm, path: {model}}}"
        config = load_config(Path(f"configs/{name}.yaml"), [*settings, own, *given])
    else:
        if "DRAWN" in SHAPES[name]:
            made = drawn_texts_data(folder, base)
        else:
            made = texts_data(folder) if "TEXTS" in SHAPES[name] else small_data(folder, base)
            made = vision_data(folder) if "IMAGES" in SHAPES[name] else made
        if "GIVEN" in SHAPES[name]:
            rows = write_jsonl(folder / "given", pairs())
            made["data"] = {"train": str(rows), "chosen": "chosen", "rejected": "rejected", "rows_per_shard": 1}
            made["prompts"].pop("train")
        config = load_config(write_small(folder, made), [*settings, *given])
    path = folder / f"{RUN}.yaml"
    path.write_text(dump_yaml(config))
    return path


@contextlib.contextmanager
def _environment(shapes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Give the environment of all runs: with a bucket, where a shape wants one."""
    variables = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    if "s3" not in shapes:
        yield variables
        return
    from tests.support.s3 import make_bucket, named_or_moto

    with named_or_moto() as server:
        os.environ.update(server.variables())
        yield {**variables, **server.variables(), "FLOWMILL_TEST_BUCKET": make_bucket()}


def main() -> None:
    """Carry out the campaign and print its table; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="in all, shared out among the shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tend", action="store_true", help="damage, repair and clear up stores between the kills")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this one; may be given again")
    options = parser.parse_args()
    prepare_environment()
    from models.quickstart.build import DigitsBuilder

    shapes = options.shape or [name for name in SHAPES if not (options.tend and name == "s3")]
    wrong = False
    with tempfile.TemporaryDirectory(prefix="flowmill-chaos-") as folder, _environment(shapes) as environment:
        for name in ("XDG_STATE_HOME", "PREFECT_HOME"):
            environment[name] = f"{folder}/{name.lower()}"
        base = Path(folder) / "base"
        DigitsBuilder(steps=20, vae_steps=20, images=500).build(base, lambda what, done, total: None)
        sys.stdout.write(
            "shape         kills  (by what)                              runs  digests, curves, processes\n"
        )
        for number, name in enumerate(shapes):
            own = Path(folder) / name.replace(", ", "-").replace(" ", "-")
            own.mkdir()
            kills = (options.kills + number) // len(shapes)
            if not kills:
                continue
            campaign = Campaign(name, own, base, random.Random(f"{options.seed}/{name}"), environment)
            outcome = campaign.kill(campaign.expected(), kills, tend=options.tend)
            by = ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.kills.items()))
            verdict = "; ".join(outcome.wrong) or "equal, complete, none left"
            sys.stdout.write(_LINE.format(name, outcome.total, by, outcome.finished, verdict))
            if outcome.tended:
                sys.stdout.write(
                    f"    {', '.join(f'{what} {count}' for what, count in sorted(outcome.tended.items()))}\n"
                )
            sys.stdout.flush()
            wrong |= bool(outcome.wrong)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
