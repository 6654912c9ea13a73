"""DataParallel and the functions of torch.nn.parallel are made here: replicas in one process."""

from trireme._core.errors import Area

AREA = Area("data_parallel")
refuse = AREA.refuse
