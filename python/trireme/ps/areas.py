"""How the parameter server refuses what it cannot do."""

from trireme._core.errors import Area

AREA = Area("ps")
