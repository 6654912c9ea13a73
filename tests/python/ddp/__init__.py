"""DistributedDataParallel is tested here."""
