"""Programs that measure, break and compare flowmill: benchmarks, kills, mutants, GPU checks, published settings."""
