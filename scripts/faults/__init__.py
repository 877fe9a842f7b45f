"""Faults injected into real multi-process runs by `python scripts/faults.py`."""
