"""What carries stages out: ranks and what starts them, orders for other processes, runners. Models are in hosting."""
