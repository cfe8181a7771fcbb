"""Bytes and paths: artifact layout, commits, trajectory stores, tables, embedding cache, lineage.

Knows nothing of models. Read ``layout.py`` for where things are and ``commit.py`` for when they count.
"""
