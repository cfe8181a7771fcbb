"""Policies, rewards and the pure maths of sampling. Knows nothing of files or runs."""
