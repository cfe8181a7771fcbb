"""What a process works with: models on a device, and its place among the ranks. Who starts ranks is in execution."""
