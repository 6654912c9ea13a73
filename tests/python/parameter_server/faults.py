"""What goes wrong on purpose while a worker pushes."""

import mmap
import tempfile

import torch


def gradient_that_kills(numel: int) -> torch.Tensor:
    """Whoever reads it is ended by a signal: the file behind its memory is cut off."""
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * numel)
        memory = mmap.mmap(file.fileno(), 4 * numel)
        gradient = torch.frombuffer(memory, dtype=torch.float32)
        file.truncate(0)
        return gradient
