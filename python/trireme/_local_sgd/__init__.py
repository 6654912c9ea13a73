"""LocalSGD and DiLoCo are made here."""

from trireme._core.errors import Area

AREA = Area("local_sgd")
refuse = AREA.refuse
