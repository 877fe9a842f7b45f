"""``--dry-run``: memory, traffic and time of a run, without running it."""
