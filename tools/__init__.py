"""Programs that measure, break and compare flowmill: benchmarks, kills, GPU checks, published settings."""
