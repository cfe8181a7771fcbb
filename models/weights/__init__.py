"""Trained parameters in files and in memory: adapters, averages, merging, sharding. Does not depend on families."""
