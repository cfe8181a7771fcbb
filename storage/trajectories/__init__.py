"""Trajectory stores, which write the samples of a shard to files and read them back.

A new store is one file here with a class that implements ``base.TrajectoryStore``, and one line in the table.
"""

from __future__ import annotations

from configs.registry import Table

TRAJECTORY_STORES = Table(
    {
        "webdataset": "storage.trajectories.webdataset:WebDatasetStore",
        "parquet": "storage.trajectories.parquet:ParquetStore",
    },
    like="storage.trajectories.base:TrajectoryStore",
)
