"""Identities of stages: the table of stages, the graph of a run, its inputs, and options by kind of policy.

Status, staleness and lineage need no more than this room and the options of ``flowmill.tasks.stages``.
"""
