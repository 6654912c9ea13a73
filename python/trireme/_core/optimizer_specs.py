"""Options of optimizers, by torch's names, for values that a strategy keeps and steps itself."""

from trireme._C import AdagradSpec as Adagrad
from trireme._C import AdamSpec as Adam
from trireme._C import AdamWSpec as AdamW
from trireme._C import RowwiseAdagradSpec as RowwiseAdagrad
from trireme._C import SgdSpec as SGD
from trireme._C import SumSpec as Sum

OptimizerSpec = SGD | Adam | AdamW | Adagrad | RowwiseAdagrad | Sum

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "OptimizerSpec", "RowwiseAdagrad", "Sum"]
