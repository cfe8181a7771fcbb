"""The runtime of one process: models on a device, and its place among the ranks. Starting ranks is in execution."""
