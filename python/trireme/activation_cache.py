"""Outputs of frozen layers, kept for each sample in the memory of the host."""

from trireme._activation.activation_cache import ActivationCache, CachedPrefix

__all__ = ["ActivationCache", "CachedPrefix"]
