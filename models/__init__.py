"""Policies, rewards and the pure maths of sampling, independent of the store and of runs.

Packages, each importing only those before it: text, maths, weights, policies, quickstart, memory, serving, rewards,
engines. Shared code is here: loading of libraries, devices, image files.
"""

from flowmill.models.library_loading import quiet_imports

quiet_imports()
