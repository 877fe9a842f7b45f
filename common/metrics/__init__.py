"""What a run records: the metrics hook, its writers, curves, and measurements."""
