"""How a process becomes a rank is tested here."""
