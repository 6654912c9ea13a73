"""What every rank has imported when the fork server of distributed.py makes it."""

import gc
import sys

import pytest
import safetensors.torch
import torch._dynamo
import torch.distributed.optim
import torch.distributed.pipelining
import trireme.dp
import trireme.fsdp
import trireme.zero

__all__ = ["pytest", "safetensors", "torch", "trireme"]

# pytest-xdist forbids its workers, and so this server, to write bytecode: each rank would compile
# the file of its test, and what that imports, anew.
sys.dont_write_bytecode = False
# What is there needs no looking through in a rank, which would copy the pages it lies in.
gc.freeze()
