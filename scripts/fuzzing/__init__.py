"""Inputs that nobody meant, for `python scripts/fuzz.py`."""
