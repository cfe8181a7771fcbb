"""Metrics and image grids computed from committed records alone: scores, curves, speed, alerts."""
