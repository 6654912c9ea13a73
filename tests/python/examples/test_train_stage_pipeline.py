"""examples/cpp/train_stage_pipeline: stages that ranks make singly learn what one module does."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples.programs import TEXT, cpp_program, losses, run

CONTEXT, CHARACTERS, BATCH, WIDTH, READ = 32, 128, 64, 64, 16 * 32
STEPS = 60


class Plain(nn.Module):
    """The six modules as one, with the values that the program gives them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CHARACTERS, 16)
        self.linear = nn.Linear(READ, WIDTH)
        self.blocks = nn.ModuleList()
        for seed in (1, 2, 3, 4):
            torch.manual_seed(seed)
            both = [nn.Linear(WIDTH, WIDTH), nn.Linear(READ, WIDTH)]
            self.blocks.append(nn.ModuleList(both))
        torch.manual_seed(5)
        self.scores = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        read = self.embedding(characters).flatten(1)
        state = self.linear(read)
        for own, reads in self.blocks:
            state = state + torch.relu(own(state) + reads(read))
        return self.scores(state)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)
    net = Plain()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    reached = []
    for step in range(STEPS):
        first = step * BATCH * 7
        batch = windows[torch.arange(first, first + BATCH * 7, 7) % windows.size(0)]
        optimizer.zero_grad()
        loss = cross_entropy(net(batch[:, :CONTEXT]), batch[:, CONTEXT])
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            reached.append(loss.item())
    assert len(reached) == 4 and reached[-1] < 0.8 * reached[0]
    return reached


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_reach_the_losses_of_one_module(alone: list[float], ranks: int) -> None:
    program = cpp_program("train_stage_pipeline")
    assert losses(run(program, ranks, steps=STEPS)) == pytest.approx(alone, rel=1e-4)
