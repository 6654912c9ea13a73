"""Checkpoint files are written and read here, for any strategy."""
