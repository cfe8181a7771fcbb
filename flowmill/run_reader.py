"""Read access to a run and its artifacts."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from flowmill.configs.exits import uninterrupted
from flowmill.configs.schema import RunConfig
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.metrics.evaluations import finished_evaluations
from flowmill.tasks.metrics.samples import arrays_of, artifact_table
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run

if TYPE_CHECKING:
    from PIL.Image import Image

    from flowmill.tasks.reports.trace import States


def picture(media: np.ndarray) -> Image | list[Image]:
    """Return (H, W, 3) uint8 as an image, or (F, H, W, 3) as the frames of a clip."""
    from PIL.Image import fromarray

    return [fromarray(frame) for frame in media] if media.ndim == 4 else fromarray(media)


class RunReader:
    """The read part of ``flowmill.Run``."""

    def __init__(self, context: RunContext, *, trust_store: bool = False) -> None:
        self._context, self._trusted = context, trust_store

    @property
    def _view(self) -> RunView:
        return RunView(self._context)

    @property
    def name(self) -> str:
        """Its name."""
        return self._context.run.name

    @property
    def config(self) -> RunConfig:
        """Its config."""
        return self._context.config

    @property
    def epochs(self) -> list[int]:
        """Epochs that were trained."""
        return self._view.trained

    @property
    def rollouts(self) -> list[int]:
        """Epochs that were rolled out."""
        return self._view.rolled_out

    @property
    def evaluations(self) -> list[int]:
        """Epochs with a complete evaluation; 0 is before training."""
        return finished_evaluations(self._context.chain)

    def samples(self, epoch: int) -> pa.Table:
        """Return an epoch's samples: prompt, seed, sigmas, log_probs, ..., and rewards.

        The columns of 'trajectories', 'reward.<label>' of each reward and monitor that was scored, 'note.<label>' of
        those that left notes, and once advantages are computed 'reward', the optimized sum, and 'advantage'.
        """
        return self._view.samples(epoch)

    def evaluation(self, epoch: int) -> pa.Table:
        """Return the samples of the run's evaluation of an epoch.

        Additional columns: 'list' of prompts, 'reward.<label>' of each reward and judge, 'note.<label>' of those that
        left notes.
        """
        return self._view.samples(epoch, evaluation=True)

    def turns(self, epoch: int, *, evaluation: bool = False) -> pa.Table:
        """Return every turn of an epoch's samples, in runs with ``render.turns``.

        Columns: sample_id; turn, from 1; text; note and reward, the remark and score that the next turn read.
        """
        return self._view.turns(epoch, evaluation=evaluation)

    def trajectories(self, epoch: int) -> pa.Table:
        """Return an epoch's samples as the rollout wrote them."""
        return artifact_table(self._context.store, self._samples_ref(epoch))

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
        pictures = self._view.pictures(epoch, samples, evaluation=evaluation)
        return {sample: picture(media) for sample, media in pictures.items()}

    def films(
        self, epoch: int, samples: Collection[str] | None = None, *, evaluation: bool = False
    ) -> dict[str, bytes]:
        """Return clips with sound as portable mp4 files by sample id; see ``images``."""
        return self._view.films(epoch, samples, evaluation=evaluation)

    def references(self, epoch: int, samples: Collection[str], *, evaluation: bool = False) -> dict[str, list[Image]]:
        """Return the input images of the samples' prompts, in order, by sample id; see ``images``.

        Empty if the prompts have no images, or if the run is from a version that did not store them.
        """
        from PIL import Image

        images_by_sample = self._view.references(epoch, samples, evaluation=evaluation)
        return {sample: [Image.fromarray(each) for each in images] for sample, images in images_by_sample.items()}

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
        return arrays_of(self._context.store, self._samples_ref(epoch), name, samples)

    def decoded(self, epoch: int, sample: str) -> list[Image | list[Image]]:
        """Return each stored state of a sample, decoded by the base model's autoencoder, as in 'states'."""
        return [picture(state) for state in self._states.of(self._samples_ref(epoch), sample)]

    @cached_property
    def _states(self) -> States:
        with uninterrupted():
            from flowmill.tasks.reports.trace import States

        return States(open_run(self._context.store.root.uri, self.name, trusted=self._trusted))

    def lineage(self) -> pa.Table:
        """Return every stage: epoch, stage, slot, artifact (null: missing), state, why and inputs."""
        return self._view.lineage()

    def figures(self) -> pa.Table:
        """Return the scores of its evaluations: epoch, list (of prompts), reward, figure (mean, exact, ...), value."""
        return self._view.figures()

    def curves(self) -> pa.Table:
        """Return the curves that MLflow shows: key, step (the epoch; of 'optimize/' the update), value, list."""
        return self._view.curves()

    def data(self) -> dict[str, list[dict[str, Any]]]:
        """Return tables of its data by title: ingested samples and rows left out, preferences, fitted rewards."""
        from flowmill.tasks.reports.data_tables import data_tables

        return data_tables(self._context)

    def stream(self, epoch: int, *, evaluation: bool = False, start: int = 0) -> Any:
        """Return an epoch's samples as a ``webdataset.DataPipeline`` over the committed tars, with rewards joined.

        Each sample has the members of the tar, undecoded, and 'scores' (reward, advantage, reward.<label>). Shards are
        split by rank and worker. Files are checked against their checksums, also those on S3.

        Args:
            epoch: the epoch; 0 for the ingested samples of a run with a section 'data'.
            evaluation: read the run's evaluation of the epoch, not its rollout.
            start: number of samples to leave out, to continue where this rank and worker stopped.
        """
        from flowmill.tasks.reports.streams import stream_of

        return stream_of(self._context, epoch, evaluation=evaluation, start=start)

    def dataset(self, epoch: int, *, evaluation: bool = False) -> Any:
        """Return an epoch's samples as a ``datasets.IterableDataset`` with images, texts, rewards and advantages.

        ``split_dataset_by_node`` splits it by rank, ``state_dict`` and ``load_state_dict`` continue it; see ``stream``.
        """
        from flowmill.tasks.reports.streams import dataset_of

        return dataset_of(self._context, epoch, evaluation=evaluation)

    def trace(self, epoch: int, sample: str) -> dict[str, Any]:
        """Return the origin of a sample, its rewards and advantage, and the optimizer updates it entered."""
        with uninterrupted():
            from flowmill.tasks.reports.trace import trace_sample

        ref = self._samples_ref(epoch)
        return trace_sample(self._context.store, ref, sample, [self._context], trusted=self._trusted)

    def _samples_ref(self, epoch: int) -> ArtifactRef:
        return self._context.chain.require(*self._context.plan.samples_of(epoch)).ref

    def _artifact(self, epoch: int, stage: str, slot: str = "") -> ArtifactRef:
        return self._context.chain.require(epoch, stage, slot).ref

    def _table(self, epoch: int, stage: str, slot: str = "") -> pa.Table:
        return artifact_table(self._context.store, self._artifact(epoch, stage, slot))
