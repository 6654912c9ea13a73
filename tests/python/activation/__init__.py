"""Checkpoints of activations, offload and partition are tested here."""
