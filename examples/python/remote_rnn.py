"""Trains a recurrent net whose embedding and decoder live at another rank, and whose LSTM is here.

    torchrun --nproc-per-node 2 examples/python/remote_rnn.py 60

Rank 0 ("ps") owns the two layers that grow with the vocabulary, and steps them; rank 1 ("trainer")
has the LSTM and the data. The loop is that of one process: forward, `loss.backward()`, `step()`.
First weights are made by a formula, so that examples/cpp/remote_rnn.cpp reaches the same losses.
"""

import sys

import torch
import trireme
from torch import Tensor, nn
from trireme import ps, remote

TOKENS, WIDTH, HIDDEN = 24, 16, 32
LENGTH, BATCH = 12, 8
LR = 0.01


def with_made_weights(module: nn.Module, first: int) -> nn.Module:
    """Small numbers without a pattern; `first` tells modules apart."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters(), first):
            places = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_((0.2 * torch.sin(places * places + number)).view_as(parameter))
    return module


@remote.function
def make_embedding() -> nn.Module:
    return with_made_weights(nn.Embedding(TOKENS, WIDTH), 1)


@remote.function
def make_decoder() -> nn.Module:
    return with_made_weights(nn.Linear(HIDDEN, TOKENS), 2)


def make_text(length: int) -> Tensor:
    """Each token follows from the one before it; every 17th is another one."""
    text = [1]
    while len(text) < length:
        place = len(text)
        text.append(place * place % TOKENS if place % 17 == 0 else (5 * text[-1] + 7) % TOKENS)
    return torch.tensor(text)


def train(steps: int) -> None:
    optimizer = ps.Adam(LR)
    embedding = remote.Module("ps", make_embedding, optimizer=optimizer)
    decoder = remote.Module("ps", make_decoder, optimizer=optimizer)
    lstm = with_made_weights(nn.LSTM(WIDTH, HIDDEN, batch_first=True), 4)
    local_optimizer = torch.optim.Adam(lstm.parameters(), lr=LR)
    windows = make_text(2000).unfold(0, LENGTH + 1, 1)
    for step in range(steps):
        rows = (torch.arange(BATCH) * 97 + step * 13) % windows.size(0)
        inputs, targets = windows[rows, :-1], windows[rows, 1:]
        states, _ = lstm(embedding(inputs))
        guesses = decoder(states)
        loss = nn.functional.cross_entropy(guesses.flatten(0, 1), targets.flatten())
        for part in (embedding, decoder, local_optimizer):
            part.zero_grad()
        loss.backward()  # goes to the decoder there, through the LSTM here, to the embedding there
        for part in (embedding, decoder, local_optimizer):
            part.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def main(steps: str = "60") -> None:
    ctx = trireme.init(device="cpu")
    if ctx.world != 2:
        raise SystemExit(f"got {ctx.world} ranks, expected 2. Use torchrun --nproc-per-node 2.")
    remote.start("ps" if ctx.rank == 0 else "trainer")
    if ctx.rank == 1:
        train(int(steps))
    remote.stop()  # "ps" serves until the trainer is here
    trireme.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
