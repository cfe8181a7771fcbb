"""Prefect flows: one per stage, one that chains them, deployments, and the command line. All of Prefect is here."""
