"""DistributedDataParallel is made here."""

from trireme._core.errors import Area

AREA = Area("ddp")
refuse = AREA.refuse
