"""The work of each stage as plain functions and classes: no Prefect here, and MLflow only in ``tracking``.

Rooms, each importing only those before it: advantages, algorithms, inputs, specs, runs, choices, metrics, export,
runtime, modalities, training, fitting, stages, execution, checks, ratings, reports, tracking.
"""
