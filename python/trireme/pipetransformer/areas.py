"""How parts of PipeTransformer refuse what they cannot do."""

from trireme._core.errors import Area

FREEZE = Area("freeze")
ELASTIC = Area("pipetransformer")
