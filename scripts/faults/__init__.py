"""Faults that a run should survive, injected into real runs of several processes; `python scripts/faults.py`."""
