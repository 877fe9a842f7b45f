"""The pieces of `python scripts/gpu_campaign.py`: what needs a GPU; with --tiny each runs on a CPU too."""
