"""Bytes and paths, independent of models. ``layout.py`` has the locations, ``artifacts/commit.py`` the commit protocol.

Rooms, each importing only those before it: backends, artifacts, trajectories, maintenance.
"""
