"""Accelerate over shared memory, with our class: started by torchrun."""

import torch
from torch.nn import functional
from trireme.integrations.accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(1)
model = torch.nn.Linear(6, 3)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.randn(8, 6)[accelerator.process_index :: 2]
for _ in range(2):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), torch.zeros(4, dtype=torch.long))
    accelerator.backward(loss)
    optimizer.step()
mean = accelerator.reduce(loss, "mean").item()
backend = torch.distributed.get_backend()
accelerator.print(backend, type(model).__module__, f"{mean:.3f}")
accelerator.end_training()
