"""Trajectory stores: how the samples of one shard become files, and back.

A new store is one file here with a class that fulfils ``base.TrajectoryStore``, and one line in the table.
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
