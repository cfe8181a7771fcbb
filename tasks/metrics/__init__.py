"""Figures and pictures of committed tables: scores, earnings, speed, suspicions. Computed from records alone."""
