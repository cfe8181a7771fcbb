"""Policies, rewards and the pure maths of sampling. Knows nothing of files or runs."""

from models.libraries import quiet_imports

quiet_imports()
