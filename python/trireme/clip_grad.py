"""Clipping by norm, whoever holds the gradients."""

from trireme._core.clip_grad import clip_grad_norm_

__all__ = ["clip_grad_norm_"]

# Users import it from here, and so it is printed and pickled.
clip_grad_norm_.__module__ = __name__
