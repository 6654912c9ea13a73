"""ZeroRedundancyOptimizer is made here."""

from trireme._core.errors import Area

AREA = Area("zero")
refuse = AREA.refuse
