"""The pieces of scripts/gpu_campaign.py."""
