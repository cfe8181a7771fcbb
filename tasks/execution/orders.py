"""What other processes are told to do: one stage of one epoch of a run, named completely, as plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.fingerprint import fingerprint
from configs.load import parse_config
from configs.schema import RunConfig
from storage.checksums import hash_file
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.lineage import RunFolder
from tasks.chain import Node
from tasks.context import RunContext
from tasks.progress import Reporter
from tasks.stage import Stage
from tasks.stage_run import StageRun


@cache
def own_code() -> str:
    """Return a hash of the program of this process: only equal ones may work on one run."""
    folder = Path(__file__).parent.parent.parent
    rooms = ("configs", "models", "storage", "tasks")
    files = [path for room in rooms for path in sorted((folder / room).rglob("*.py"))]
    return fingerprint([[str(path.relative_to(folder)), hash_file(path)] for path in files])


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One stage to carry out."""

    config: Mapping[str, Any]
    """The run's config, or another that this stage is run with."""
    run: str
    """Name of the run."""
    epoch: int
    """Epoch of the one stage that is run with another config; 0 with the run's own."""
    node: tuple[int, str, str]
    """The stage."""
    artifact: str
    """What it makes."""
    inputs: tuple[str, ...]
    """What it reads."""
    code: str
    """The program that gives it, see ``own_code``."""
    number: int = 0
    """Of those given to ranks: how many were given before."""

    @classmethod
    def of(cls, run: StageRun, *, number: int = 0) -> Order:
        """Return the order to carry out a stage."""
        stage, context = run.stage, run.stage.context
        config = context.config.model_dump(mode="json")
        config["store"]["root"] = run.store.root.uri
        return cls(
            config=config,
            run=context.run.name,
            epoch=context.epoch,
            node=(stage.node.epoch, stage.node.stage, stage.node.slot),
            artifact=str(run.ref),
            inputs=tuple(str(ref) for ref in stage.inputs()),
            code=own_code(),
            number=number,
        )

    @classmethod
    def parse(cls, line: str) -> Order:
        """Return what ``line`` gave as text."""
        data = json.loads(line)
        return cls(**{**data, "node": tuple(data["node"]), "inputs": tuple(data["inputs"])})

    def line(self) -> str:
        """Return the order as one line."""
        return json.dumps(asdict(self))

    @property
    def root(self) -> str:
        """The store."""
        return str(self.config["store"]["root"])

    @property
    def settings(self) -> tuple[object, ...]:
        """What orders with one context have in common."""
        return (self.config, self.run, self.epoch)

    def parsed_config(self) -> RunConfig:
        """Return the config."""
        return parse_config(dict(self.config), where=f"run '{self.run}'")

    def context(self, reporter: Reporter) -> RunContext:
        """Return the run's context in this process."""
        config = self.parsed_config()
        store = ArtifactStore(config.store)
        return RunContext(store, config, RunFolder(store, self.run), reporter=reporter, epoch=self.epoch)

    def stage(self, context: RunContext) -> Stage:
        """Return the stage."""
        stage = context.chain.stage(Node(*self.node))
        stage.adopt(ArtifactRef.parse(self.artifact), [ArtifactRef.parse(ref) for ref in self.inputs])
        return stage


class OrderedContext:
    """The context of the order a process works on: it stays, with its models, from order to order of one run."""

    def __init__(self) -> None:
        """Know of no run."""
        self._order: Order | None = None
        self._context: RunContext | None = None

    def of(self, order: Order, reporter: Callable[[], Reporter], on_open: Callable[[RunContext], None]) -> RunContext:
        """Return the context of an order's run; one of another run or config lets its models go.

        Args:
            order: the order.
            reporter: makes who shows progress.
            on_open: called with a context that is new.
        """
        context, known = self._context, self._order
        if context is None or known is None or known.settings != order.settings:
            # Forgotten first: where the new one cannot be opened, the next try must not take the old one for it.
            self._context = self._order = None
            if context is not None:
                context.close()
            context = order.context(reporter())
            on_open(context)
        elif (known.node, known.artifact) != (order.node, order.artifact):
            context.refresh()
        self._context, self._order = context, order
        return context
