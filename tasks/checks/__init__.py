"""What refuses and forecasts before any work: configs, rewards, memory, cost. Rules of one kind are with it."""
