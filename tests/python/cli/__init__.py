"""The commands of ``python -m trireme`` are tested here."""
