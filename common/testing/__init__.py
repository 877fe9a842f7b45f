"""Shared by tests only."""
