"""Sizes and memory of published models, without their weights."""
