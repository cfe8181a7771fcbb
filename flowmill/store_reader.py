"""Read access to stores and runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa

from flowmill.configs.override_quoting import override_list
from flowmill.flows.environment import existing_root
from flowmill.run_reader import RunReader, picture
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import list_runs
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.verify import list_artifacts
from flowmill.tasks.metrics.samples import artifact_table, check_reader, media_of
from flowmill.tasks.runs.addresses import find_artifact
from flowmill.tasks.runs.opening import open_run


def open(root: str | Path | None = None) -> Store:
    """Return an existing store.

    Args:
        root: its folder or s3://bucket/prefix; FLOWMILL_ROOT, else 'flowmill-store', when absent.

    Raises:
        FlowmillError: the store does not exist.
    """
    return Store(ArtifactStore(existing_root(root)))


class Store:
    """Artifacts and runs below one root."""

    def __init__(self, store: ArtifactStore) -> None:
        """Bind to a store; ``flowmill.open`` finds one."""
        self._store = store

    @property
    def root(self) -> str:
        """Its location."""
        return self._store.root.uri

    @property
    def runs(self) -> list[str]:
        """Names of its runs."""
        return list_runs(self._store)

    def run(self, name: str, *, trust_store: bool = False) -> Run:
        """Return a run.

        Args:
            name: its name.
            trust_store: let its stages run code and commands that only the store's record of the run names.

        Raises:
            FlowmillError: the run does not exist.
        """
        return Run(open_run(self.root, name, reads=True, trusted=trust_store), trust_store=trust_store)

    def artifacts(self) -> pa.Table:
        """Return the table of 'flowmill store ls': artifact, stage, shards, rows, size (bytes), age_s, runs, ..."""
        import pyarrow as pa

        return pa.Table.from_pylist(list_artifacts(self._store))

    def table(self, artifact: str) -> pa.Table:
        """Return all rows of an artifact of samples, prompts, rewards or advantages.

        Args:
            artifact: kind/id; the kind may be omitted and the id shortened.

        Raises:
            FlowmillError: the artifact does not exist, has no rows, has a damaged file, or is read by code that only
                the store names.
        """
        return artifact_table(self._store, self._ref(artifact))

    def images(self, artifact: str, samples: Collection[str] | None = None) -> dict[str, Any]:
        """Return the images of an artifact of samples by their ids; see ``Run.images``."""
        return {sample: picture(media) for sample, media in media_of(self._store, self._ref(artifact), samples).items()}

    def _ref(self, artifact: str) -> ArtifactRef:
        ref = find_artifact(self._store, artifact)
        check_reader(self._store, ref)
        return ref


class Run(RunReader):
    """One run and its artifacts, by epoch. Epoch 0 is before training; tables are Arrow's (``.to_pandas()``).

    ``Store.run`` finds one and ``flowmill.start`` makes one.

    All methods raise a FlowmillError if their artifact is missing or damaged.
    """

    def __repr__(self) -> str:
        return f"<run '{self.name}' in '{self._context.store.root.uri}'>"

    def _repr_html_(self) -> str:
        """Return the run as a notebook shows it."""
        from flowmill.run_display import as_html

        return as_html(self)

    @property
    def store(self) -> Store:
        """Its store."""
        return Store(self._context.store)

    def refresh(self) -> None:
        """Reload the run's records, which are otherwise read once."""
        self._context = open_run(self.store.root, self.name, reads=True, trusted=self._trusted)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the results as one self-contained HTML file, as 'flowmill report' does.

        Args:
            out: the file; 'NAME-report.html' in the working directory when absent.

        Returns:
            The file.

        Raises:
            FlowmillError: the file cannot be written.
        """
        from flowmill.tasks.reports.report import run_report, save_report

        return save_report(run_report(self._context), Path(out or f"{self.name}-report.html"))

    # Making

    def prepare(self) -> list[str]:
        """Run the stages before all epochs: base model, embeddings, prompts, the policy before training.

        Returns:
            The artifacts, 'kind/id'.

        Raises:
            FlowmillError: something cannot work; committed data stays.
        """
        from flowmill.tasks.specs.stages import names_of

        return [name for stage in names_of("run") if self._context.plan.has(stage) for name in self.stage(stage, 0)]

    def stage(
        self,
        name: str,
        epoch: int | str = "latest",
        *,
        slot: str = "",
        overrides: str | Collection[str] = (),
        force: bool = False,
    ) -> list[str]:
        """Run one stage, as 'flowmill stage' does; committed artifacts are not computed again.

        Inside a Prefect flow it is a flow below yours, on your flow's server. Elsewhere a server is started for it.

        Args:
            name: rollout, score, advantage, optimize, evaluate, judge, export, or one of ``prepare``.
            epoch: a number, 'next' or 'latest'.
            slot: of score and judge: one reward; all of them when empty.
            overrides: settings of this stage alone, 'section.key=value' each; the result is kept next to the run.
            force: do the work again, as a new attempt.

        Returns:
            The artifacts it computed or reused, 'kind/id'; ``Store.table`` reads them.

        Raises:
            FlowmillError: something cannot work; committed data stays.
        """
        from flowmill.components import run_stage

        fields = {
            "epoch": epoch,
            "slot": slot,
            "overrides": override_list(overrides),
            "force": force,
            "trust_store": self._trusted,
        }
        names = run_stage(self._context, name, fields)
        self.refresh()
        return names

    def train(self) -> Run:
        """Complete the run of its config, as 'flowmill run' does; committed artifacts are not computed again.

        Raises:
            FlowmillError: something cannot work; committed data stays.
        """
        from flowmill.components import train

        train(self._context, trust_store=self._trusted)
        self.refresh()
        return self
