"""A process becomes a rank here, and the c10d backend is registered."""
