"""HTTP between a run and servers of models: clients that are bounded and patient, and the common part of servers."""
