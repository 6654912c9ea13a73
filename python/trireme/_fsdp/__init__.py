"""What fully_shard makes of modules lives here."""
