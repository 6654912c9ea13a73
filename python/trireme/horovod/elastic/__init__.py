"""Training that goes on from its last commit after an operation has failed: ``hvd.elastic``."""

from trireme.horovod.elastic.run import run
from trireme.horovod.elastic.sampler import ElasticSampler
from trireme.horovod.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
