"""What a run is: what counts of it, what is stale and why, how it is opened, and which epochs a schedule means."""
