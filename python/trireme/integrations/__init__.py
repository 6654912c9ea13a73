"""Trireme inside of Lightning, Accelerate, Transformers and Ray.

Each module of this package imports its framework, and is imported only where a program asks for it:
``import trireme.integrations.lightning``. None of the frameworks is a dependency of Trireme.
"""

from trireme.integrations.torch_names import in_place_of_torch

__all__ = ["in_place_of_torch"]
