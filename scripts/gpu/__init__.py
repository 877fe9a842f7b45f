"""The pieces of `python scripts/gpu_campaign.py`: what needs a GPU, and runs at its smallest on a CPU too."""
