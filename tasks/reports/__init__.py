"""Views of finished work: tables, reports, traces, comparisons, benchmarks. MLflow is in ``tracking``."""
