"""What people look at afterwards: tables, reports, traces, comparisons, benchmarks. MLflow is in tracking."""
