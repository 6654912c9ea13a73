"""A process becomes a rank here, and the c10d backend is registered."""

from trireme._core.errors import Area

AREA = Area("launch")
refuse = AREA.refuse
