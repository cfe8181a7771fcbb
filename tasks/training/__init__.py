"""Trains the next policy version from stored trajectories and advantages (the optimize stage)."""
