"""How remote calls refuse what they cannot do."""

from trireme._core.errors import Area

AREA = Area("remote")
