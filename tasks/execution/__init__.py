"""What carries stages out: the models of a process, the ranks that work together, and what starts them."""
