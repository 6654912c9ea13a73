"""What rows of a sparse table hold before anybody has pushed them."""

from trireme._C import PsNormal as Normal
from trireme._C import PsUniform as Uniform
from trireme._C import PsZeros as Zeros

RowInit = Zeros | Normal | Uniform

__all__ = ["Normal", "RowInit", "Uniform", "Zeros"]
