"""fully_shard is tested here."""
