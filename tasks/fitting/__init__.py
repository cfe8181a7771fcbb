"""Rewards fitted on judgments of people: reading, splitting, training, measuring, and committing the result."""
