"""Bytes and paths: artifact layout, commits, trajectory stores, tables, embedding cache, lineage.

Independent of models. Read ``layout.py`` for locations and ``commit.py`` for the commit protocol.
"""
