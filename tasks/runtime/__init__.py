"""The runtime of one process: its models, device and rank. ``execution`` starts the ranks."""
