"""Invalid inputs for `python scripts/fuzz.py`."""
