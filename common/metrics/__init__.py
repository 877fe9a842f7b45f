"""What a run records: the metrics hook, its writers, the profiler, provenance."""
