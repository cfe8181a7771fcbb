"""Trajectory stores: how the samples of one shard become files, and back.

A new store is one file here with a class that fulfils ``base.TrajectoryStore``, and one line in the table.
"""

TRAJECTORY_STORES = {
    "webdataset": "storage.trajectories.webdataset:WebDatasetStore",
    "parquet": "storage.trajectories.parquet:ParquetStore",
}
