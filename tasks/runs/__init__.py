"""Runs: their current artifacts, staleness with causes, opening, and the epochs of schedules."""
