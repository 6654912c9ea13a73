"""DistributedDataParallel is made here."""

from trireme._core.errors import Area

refuse = Area("ddp").refuse
