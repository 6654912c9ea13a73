"""Checkpoint files are tested here."""
