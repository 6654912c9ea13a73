"""Pipelines over ranks: which rank does what, and in which order."""

from trireme._core.errors import Area

AREA = Area("pipeline")
refuse = AREA.refuse
