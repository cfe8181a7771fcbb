"""Executors of shards: this process, ranks and their launchers, jobs for other processes. Models are in runtime."""
