"""Policies, rewards and the pure maths of sampling. Knows nothing of the store or of runs.

Rooms, each importing only those before it: maths, weights, policies, quickstart, sizes, rewards; shared code is here:
libraries, devices, the meter.
"""

from models.library_loading import quiet_imports

quiet_imports()
