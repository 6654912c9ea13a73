"""Pipelines over ranks are tested here."""
