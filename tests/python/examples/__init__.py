"""The programs of examples/ are tested here."""
