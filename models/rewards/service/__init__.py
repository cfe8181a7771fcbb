"""Rewards over HTTP: wire format (``wire``) and server (``batching``, ``app``), see ``flowmill.models.rewards.remote``
too.

The server needs neither torch nor Prefect unless its reward does.
"""
