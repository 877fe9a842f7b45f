"""Launchers and stop signals."""
