"""Checks and forecasts before a run starts: configs, rewards, memory, cost. Rules for one policy kind live with it."""
