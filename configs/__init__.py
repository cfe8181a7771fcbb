"""The configuration: schema, loading, fingerprints and errors, plus the runnable YAML presets.

Imports no torch, so that commands that only read settings start quickly.
"""
