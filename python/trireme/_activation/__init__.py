"""What autograd keeps of a forward: recomputed, offloaded, or shared by ranks."""

from trireme._core.errors import Area

AREA = Area("checkpoint")
refuse = AREA.refuse
