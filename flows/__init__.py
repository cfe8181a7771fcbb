"""Prefect flows: one per stage, one that chains them, deployments, and the command line. The only place with Prefect."""
