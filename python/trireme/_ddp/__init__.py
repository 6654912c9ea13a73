"""DistributedDataParallel is made here."""
