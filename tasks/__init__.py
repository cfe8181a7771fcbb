"""The work of each stage as plain functions and classes: no Prefect here, and MLflow only in ``tracking.py``."""
