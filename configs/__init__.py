"""The configuration: schema, loading, fingerprints and errors, plus the runnable YAML presets.

Imports no torch, so that every command that only reads settings starts at once.
"""
