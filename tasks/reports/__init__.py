"""Views of finished work: tables, reports, traces, comparisons. MLflow is in ``tracking``."""
