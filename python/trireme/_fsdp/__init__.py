"""What fully_shard makes of modules lives here."""

from trireme._core.errors import Area

AREA = Area("fully_shard")
refuse = AREA.refuse
