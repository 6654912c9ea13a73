"""Sparse gradients of embeddings, beside dense ones."""

from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn

from ddp.ranks import assert_equals_torch, record_wire
from harness.on_ranks import WORLD, on_ranks
from harness.recording import needs_recording


class Words(nn.Module):
    """Two sparse embeddings of which the second may be left out, then a dense layer."""

    def __init__(self, bag: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.words = kind(10, 4, sparse=True)
        self.rare = kind(6, 4, sparse=True)
        self.dense = nn.Linear(4, 3)

    def forward(self, words: torch.Tensor, rare: torch.Tensor | None) -> torch.Tensor:
        hidden = self.words(words)
        if rare is not None:
            hidden = hidden + self.rare(rare)
        return self.dense(hidden)


def bags() -> nn.Module:
    return Words(bag=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def indices(step: int, rank: int, below: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(below, (2, 3 + rank), generator=generator)  # ranks use different rows


def both(model: nn.Module, step: int, rank: int) -> None:
    model(indices(step, rank, 10), indices(step + 50, rank, 6)).square().sum().backward()


def dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def double_words() -> nn.Module:
    return Words().double()


@pytest.mark.parametrize("make_model", [Words, bags, double_words])
@on_ranks()
def test_equals_one_process(rank: int, make_model: Callable[[], nn.Module]) -> None:
    """torch's class is no oracle here: it loses rows that a rank's batch repeats."""
    ddp, alone = trireme.DistributedDataParallel(make_model()), make_model()
    optimizers = [sgd(ddp), sgd(alone)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        both(ddp, step, rank)
        for of in range(WORLD):
            x = indices(step, of, 10), indices(step + 50, of, 6)
            (alone(*x).square().sum() / WORLD).backward()
        for got, expected in zip(ddp.parameters(), alone.parameters(), strict=True):
            assert got.grad.is_sparse == expected.grad.is_sparse
            torch.testing.assert_close(dense(got.grad), dense(expected.grad))
        for optimizer in optimizers:
            optimizer.step()


@on_ranks()
def test_sparse_adam(rank: int) -> None:
    """Sparse gradients stay sparse: SparseAdam refuses others."""

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.words = nn.Embedding(10, 4, sparse=True)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.words(words)

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(model.parameters()), lr=0.01)

    def step(model: nn.Module, number: int, rank: int) -> None:
        model(indices(number, rank, 10)[:1].unique()).square().sum().backward()

    assert_equals_torch(Only, step, rank, make_optimizer=adam)


@pytest.mark.parametrize("users", [(True, False), (False, True), (False, False)])
@on_ranks()
def test_an_embedding_that_ranks_leave_out(rank: int, users: tuple[bool, bool]) -> None:
    ddp = trireme.DistributedDataParallel(Words())
    for step in range(4):
        ddp.zero_grad()
        rare = indices(step, rank, 6)[:, :3] if users[rank] else None
        ddp(indices(step, 0, 10), rare).square().sum().backward()

        alone = Words()
        for of in range(WORLD):
            rare = indices(step, of, 6)[:, :3] if users[of] else None
            (alone(indices(step, 0, 10), rare).square().sum() / WORLD).backward()
        for got, expected in zip(ddp.parameters(), alone.parameters(), strict=True):
            if expected.grad is None:
                assert got.grad is None
            else:
                assert got.grad.is_sparse == expected.grad.is_sparse
                torch.testing.assert_close(dense(got.grad), dense(expected.grad))


class TiedWords(nn.Module):
    def __init__(self, with_dense_head: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(10, 4, sparse=True)
        self.again = nn.Embedding(10, 4, sparse=True)
        self.again.weight = self.words.weight
        self.head = nn.Linear(4, 10, bias=False)
        if with_dense_head:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words) * self.again(words.flip(0)))


@pytest.mark.parametrize("with_dense_head", [False, True])
@on_ranks()
def test_tied_embeddings(rank: int, with_dense_head: bool) -> None:
    """With a dense user among them the gradient of the tied weight is dense, as without DDP."""
    ddp = trireme.DistributedDataParallel(TiedWords(with_dense_head))
    for step in range(3):
        ddp.zero_grad()
        ddp(indices(step, rank, 10)).square().mean().backward()
        alone = TiedWords(with_dense_head)
        for of in range(WORLD):
            (alone(indices(step, of, 10)).square().mean() / WORLD).backward()
        got, expected = ddp.module.words.weight.grad, alone.words.weight.grad
        torch.testing.assert_close(dense(got), dense(expected))
        assert got.is_sparse == expected.is_sparse
        torch.testing.assert_close(ddp.module.head.weight.grad, alone.head.weight.grad)


@on_ranks()
def test_accumulation_under_no_sync(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Words())
    for _ in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            both(ddp, 0, rank)
        both(ddp, 1, rank)
        alone = Words()
        for step in (0, 1):
            for of in range(WORLD):
                x = indices(step, of, 10), indices(step + 50, of, 6)
                (alone(*x).square().sum() / WORLD).backward()
        for got, expected in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(dense(got.grad), dense(expected.grad))


@needs_recording
@on_ranks()
def test_a_sparse_gradient_travels_sparse_and_alone(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Words())
    assert ["words.weight"] in ddp._core.plan() and ["rare.weight"] in ddp._core.plan()
    assert "Float cpu sparse, 1 gradient: words.weight" in ddp._core.describe_plan()
    wire = record_wire(ddp)
    both(ddp, 0, rank)
    assert ddp.module.words.weight.grad.is_sparse
    assert any(record.label.endswith("words.weight") for record in wire.records)
