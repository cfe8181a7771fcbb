"""Causal language models: samples are texts, and one row of training is a whole sample with a mask of its tokens."""
