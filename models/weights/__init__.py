"""Trained parameters as files and in memory: adapters, averages, merging, spreading over ranks. No family by name."""
