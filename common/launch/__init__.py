"""How a process was started, and how it is stopped."""
