"""Activation checkpoints, offload and partition are tested here."""
