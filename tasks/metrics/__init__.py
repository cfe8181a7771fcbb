"""Figures and pictures of committed tables: scores, curves, speed, alerts. Computed from records alone."""
