"""Slow, obvious references in float64: one number at a time, no tensors."""
