"""Trajectory stores, which write the samples of a shard to files and read them back.

A new store is one file here with a class that implements ``base.TrajectoryStore``, and one line in the table.
"""

from flowmill.configs.registry import Table

TRAJECTORY_STORES = Table(
    {
        "webdataset": "flowmill.storage.trajectories.webdataset:WebDatasetStore",
        "parquet": "flowmill.storage.trajectories.parquet:ParquetStore",
    },
    like="flowmill.storage.trajectories.base:TrajectoryStore",
)
