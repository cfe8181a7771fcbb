"""Read access to stores and runs."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any

from configs.schema import RunConfig
from flowmill.images import picture, pictures
from flows.environment import existing_root

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from PIL.Image import Image

    from storage.artifacts.commit import ArtifactStore
    from storage.layout import ArtifactRef
    from tasks.reports.reading import States
    from tasks.runs.context import RunContext
    from tasks.specs.graph import Node


def open(root: str | None = None) -> Store:
    """Return an existing store.

    Args:
        root: its folder or s3://bucket/prefix; FLOWMILL_ROOT, else 'flowmill-store', when absent.

    Raises:
        FlowmillError: the store does not exist.
    """
    from storage.artifacts.commit import ArtifactStore

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
        from storage.artifacts.lineage import list_runs

        return list_runs(self._store)

    def run(self, name: str, *, trust_store: bool = False) -> Run:
        """Return a run.

        Args:
            name: its name.
            trust_store: let its stages run code and commands that only the store's record of the run names.

        Raises:
            FlowmillError: the run does not exist.
        """
        from tasks.runs.opening import open_run

        return Run(open_run(self.root, name, reads=True, trusted=trust_store), trust_store=trust_store)

    def artifacts(self) -> pa.Table:
        """Return the table of 'flowmill store ls': artifact, stage, shards, rows, size (bytes), age_s, runs, ..."""
        import pyarrow as pa

        from storage.maintenance.verify import list_artifacts

        return pa.Table.from_pylist(list_artifacts(self._store))

    def table(self, artifact: str) -> pa.Table:
        """Return all rows of an artifact of samples, prompts, rewards or advantages.

        Args:
            artifact: kind/id; the kind may be omitted and the id shortened.

        Raises:
            FlowmillError: the artifact does not exist, has no rows, or has a damaged file.
        """
        from tasks.reports.reading import artifact_table

        return artifact_table(self._store, self._ref(artifact))

    def images(self, artifact: str, samples: Collection[str] | None = None) -> dict[str, Any]:
        """Return the images of an artifact of samples by their ids; see ``Run.images``."""
        return pictures(self._store, self._ref(artifact), samples)

    def _ref(self, artifact: str) -> ArtifactRef:
        from tasks.runs.addresses import find_artifact

        return find_artifact(self._store, artifact)


class Run:
    """One run and its artifacts, by epoch. Epoch 0 is before training; tables are Arrow's (``.to_pandas()``).

    All methods raise a FlowmillError if their artifact is missing or damaged.
    """

    def __init__(self, context: RunContext, *, trust_store: bool = False) -> None:
        """Bind to a run; ``Store.run`` finds one and ``flowmill.start`` makes one."""
        self._context = context
        self._trusted = trust_store

    def __repr__(self) -> str:
        return f"<run '{self.name}' in '{self._context.store.root.uri}'>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._context.run.name

    @property
    def store(self) -> Store:
        """Its store."""
        return Store(self._context.store)

    @property
    def config(self) -> RunConfig:
        """Its config."""
        return self._context.config

    @property
    def epochs(self) -> list[int]:
        """Epochs that were trained."""
        from tasks.reports.reading import trained_epochs

        return trained_epochs(self._context.chain)

    @property
    def rollouts(self) -> list[int]:
        """Epochs that were rolled out."""
        from tasks.reports.reading import rolled_out_epochs

        return rolled_out_epochs(self._context.chain)

    @property
    def evaluations(self) -> list[int]:
        """Epochs with a complete evaluation; 0 is before training."""
        from tasks.metrics.evaluations import finished_evaluations

        return finished_evaluations(self._context.chain)

    def samples(self, epoch: int) -> pa.Table:
        """Return an epoch's samples: prompt, seed, sigmas, log_probs, ..., and rewards.

        The columns of 'trajectories', 'reward.<label>' of each reward and monitor that was scored, and once advantages
        are made 'reward', the optimized sum, and 'advantage'.
        """
        from tasks.reports.reading import samples_of_epoch

        return samples_of_epoch(self._context.chain, epoch)

    def evaluation(self, epoch: int) -> pa.Table:
        """Return the samples of the run's evaluation of an epoch, with 'reward.<label>' of each reward and judge."""
        from tasks.reports.reading import samples_of_evaluation

        return samples_of_evaluation(self._context.chain, epoch)

    def trajectories(self, epoch: int) -> pa.Table:
        """Return an epoch's samples as the rollout wrote them."""
        return self._table(epoch, "rollout")

    def rewards(self, epoch: int, slot: str | None = None) -> pa.Table:
        """Return the scores of an epoch by one reward, named by its label; the first one when absent."""
        return self._table(epoch, "score", slot or self.config.rewards[0].slot)

    def advantages(self, epoch: int) -> pa.Table:
        """Return the optimized sums and advantages of an epoch."""
        return self._table(epoch, "advantage")

    def values(self, epoch: int) -> pa.Table:
        """Return the values and the base model's log-probs of an epoch's tokens, of runs that have such a stage."""
        return self._table(epoch, "value")

    def gradients(self, epoch: int, slot: str | None = None) -> pa.Table:
        """Return the sizes of one reward's gradients at an epoch's samples, for runs that train on stored gradients."""
        return self._table(epoch, "gradient", slot or self.config.rewards[0].slot)

    def images(
        self, epoch: int, samples: Collection[str] | None = None, *, evaluation: bool = False
    ) -> dict[str, Image | list[Image]]:
        """Return images, or the frames of clips, by sample id; a list if each text is rendered several times.

        Args:
            epoch: the epoch.
            samples: ids, as in the column 'sample_id'; all when absent.
            evaluation: read the run's evaluation of the epoch, not its rollout.
        """
        from tasks.reports.reading import pictures_of

        found = pictures_of(self._context.chain, epoch, samples, evaluation=evaluation)
        return {sample: picture(media) for sample, media in found.items()}

    def films(
        self, epoch: int, samples: Collection[str] | None = None, *, evaluation: bool = False
    ) -> dict[str, bytes]:
        """Return clips with sound as portable mp4 files by sample id; see ``images``."""
        from tasks.reports.clips import films_of

        return films_of(self._context.chain, epoch, samples, evaluation=evaluation)

    def references(self, epoch: int, samples: Collection[str], *, evaluation: bool = False) -> dict[str, list[Image]]:
        """Return the input images of the samples' prompts, in order, by sample id; see ``images``.

        Empty if the prompts have no images, or if the run is from a version that did not store them.
        """
        from PIL import Image

        from tasks.reports.reading import references_of

        stage = "evaluate" if evaluation else "rollout"
        found = references_of(self._context, self._made(epoch, stage), samples)
        return {sample: [Image.fromarray(each) for each in images] for sample, images in found.items()}

    def arrays(
        self, epoch: int, name: str = "latents", samples: Collection[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Return a stored array of an epoch's samples by their ids.

        Args:
            epoch: the epoch.
            name: 'latents', (N, ...) float32 or float16 of the N steps in the column 'states'; 'means', (S, ...);
                'unconditional', (S, ...); 'final', (...).
            samples: ids; all when absent.
        """
        from tasks.reports.reading import arrays_of

        return arrays_of(self._context.store, self._made(epoch, "rollout"), name, samples)

    def decoded(self, epoch: int, sample: str) -> list[Image | list[Image]]:
        """Return each stored state of a sample, decoded by the base model's autoencoder, as in 'states'."""
        return [picture(state) for state in self._states.of(self._made(epoch, "rollout"), sample)]

    @cached_property
    def _states(self) -> States:
        from tasks.reports.reading import States
        from tasks.runs.opening import open_run

        return States(open_run(self.store.root, self.name, trusted=self._trusted))

    def lineage(self) -> pa.Table:
        """Return every stage: epoch, stage, slot, artifact (null: missing), state, why and inputs."""
        from tasks.reports.reading import lineage_table

        return lineage_table(self._context.chain)

    def figures(self) -> pa.Table:
        """Return the scores of its evaluations: epoch, list (of prompts), reward, figure (mean, exact, ...), value."""
        from tasks.reports.reading import figures_table

        return figures_table(self._context.chain)

    def curves(self) -> pa.Table:
        """Return the curves that MLflow shows: key, step (the epoch; of 'optimize/' the update), value, list."""
        from tasks.reports.reading import curves_table

        return curves_table(self._context.chain)

    def stream(self, epoch: int, *, evaluation: bool = False, start: int = 0) -> Any:
        """Return an epoch's samples as a ``webdataset.DataPipeline`` over the committed tars, with rewards joined.

        Each sample has the members of the tar, undecoded, and 'scores' (reward, advantage, reward.<label>). Shards are
        split by rank and worker. Files are checked against their checksums, also those on S3.

        Args:
            epoch: the epoch; 0 for the given samples of a run with a section 'data'.
            evaluation: read the run's evaluation of the epoch, not its rollout.
            start: number of samples to leave out, to continue where this rank and worker stopped.
        """
        from tasks.reports.streams import stream_of

        return stream_of(self._context, self._samples_node(epoch, evaluation), start=start)

    def dataset(self, epoch: int, *, evaluation: bool = False) -> Any:
        """Return an epoch's samples as a ``datasets.IterableDataset`` with images, texts, rewards and advantages.

        ``split_dataset_by_node`` splits it by rank, ``state_dict`` and ``load_state_dict`` continue it; see ``stream``.
        """
        from tasks.reports.streams import dataset_of

        return dataset_of(self._context, self._samples_node(epoch, evaluation))

    def _samples_node(self, epoch: int, evaluation: bool) -> Node:
        from tasks.specs.graph import Node

        return Node(epoch, "evaluate") if evaluation else self._context.plan.samples_of(epoch)

    def trace(self, epoch: int, sample: str) -> dict[str, Any]:
        """Return the origin of a sample, its rewards and advantage, and the optimizer updates it entered."""
        from tasks.reports.trace import trace_sample

        ref = self._made(epoch, "rollout")
        return trace_sample(self._context.store, ref, sample, [self._context], trusted=self._trusted)

    def refresh(self) -> None:
        """Reload the run's records, which are otherwise read once."""
        from tasks.runs.opening import open_run

        self._context = open_run(self.store.root, self.name, reads=True, trusted=self._trusted)

    # Making

    def prepare(self) -> list[str]:
        """Run the stages before all epochs: base model, embeddings, prompts, the policy before training.

        Returns:
            The artifacts, 'kind/id'.

        Raises:
            FlowmillError: something cannot work; committed data stays.
        """
        from tasks.specs.stages import names_of

        return [made for stage in names_of("run") for made in self.stage(stage, 0)]

    def stage(
        self,
        name: str,
        epoch: int | str = "latest",
        *,
        slot: str = "",
        overrides: Collection[str] = (),
        force: bool = False,
    ) -> list[str]:
        """Run one stage, as 'flowmill stage' does; committed artifacts are not computed again.

        Inside a Prefect flow it is a flow below yours, on your flow's server. Elsewhere a server is started for it.

        Args:
            name: rollout, score, advantage, optimize, evaluate, judge, export, or one of ``prepare``.
            epoch: a number, 'next' or 'latest'.
            slot: of score and judge: one reward; all of them when empty.
            overrides: settings of this stage alone, 'section.key=value'; the result is a side result of the run.
            force: do the work again, as a new attempt.

        Returns:
            The artifacts it made or found, 'kind/id'; ``Store.table`` reads them.

        Raises:
            FlowmillError: something cannot work; committed data stays.
        """
        from flowmill.components import run_stage

        asked = {"epoch": epoch, "slot": slot, "overrides": [*overrides], "force": force, "trust_store": self._trusted}
        made = run_stage(self._context, name, asked)
        self.refresh()
        return made

    def train(self) -> Run:
        """Complete the run of its config, as 'flowmill run' does; committed artifacts are not computed again.

        Raises:
            FlowmillError: something cannot work; committed data stays.
        """
        from flowmill.components import train

        train(self._context, trust_store=self._trusted)
        self.refresh()
        return self

    def _made(self, epoch: int, stage: str, slot: str = "") -> ArtifactRef:
        return self._context.chain.require(epoch, stage, slot).ref

    def _table(self, epoch: int, stage: str, slot: str = "") -> pa.Table:
        from tasks.reports.reading import artifact_table

        return artifact_table(self._context.store, self._made(epoch, stage, slot))
