"""Lightning Fabric over shared memory, with our class. It starts its ranks itself."""

import torch
import trireme.integrations.lightning  # noqa: F401
from lightning.fabric import Fabric
from torch.nn import functional

fabric = Fabric(accelerator="cpu", devices=2, strategy="trireme_ddp")
fabric.launch()
fabric.seed_everything(1, verbose=False)
model = torch.nn.Linear(6, 3)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.randn(8, 6)[fabric.global_rank :: 2]
for _ in range(2):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), torch.zeros(4, dtype=torch.long))
    fabric.backward(loss)
    optimizer.step()
count = fabric.all_reduce(torch.tensor(fabric.global_rank * 2), reduce_op="mean")
fabric.print(torch.distributed.get_backend(), f"{fabric.all_reduce(loss).item():.3f}", int(count))
