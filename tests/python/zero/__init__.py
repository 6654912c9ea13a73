"""ZeroRedundancyOptimizer is tested here."""
