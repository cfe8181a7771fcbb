"""Rewards over HTTP: wire format (``wire``), client (``client``) and server (``batching``, ``app``).

The server needs neither torch nor Prefect unless its reward does.
"""
