"""The commit protocol: records, artifacts, shards, checkpoints and the lineage of runs."""
