"""Causal language models: samples are texts, and a training row is a whole sample with a mask of its tokens."""
