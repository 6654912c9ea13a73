"""What fully_shard makes of modules lives here."""

from trireme._core.errors import Area

refuse = Area("fully_shard").refuse
