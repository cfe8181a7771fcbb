"""The work of each stage as plain functions and classes: no Prefect here, and MLflow only in ``tracking``.

Rooms, each importing only those before it: algorithms, inputs, identities, runs, figures, export, hosting, kinds,
optimize, stages, execution, preflight, review, tracking.
"""
