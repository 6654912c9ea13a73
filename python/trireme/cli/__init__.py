"""The commands of ``python -m trireme`` are here."""
