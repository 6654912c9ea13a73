"""The c10d backend ``trireme`` is tested here."""
