"""Rewards over HTTP: what is sent (``wire``), who asks (``client``), and who answers (``batching``, ``app``).

The server needs neither torch nor Prefect unless its reward does.
"""
