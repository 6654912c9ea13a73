"""ZeroRedundancyOptimizer is made here."""
