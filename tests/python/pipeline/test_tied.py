"""Parameters that layers of several ranks share: copies that stay equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from harness.faults import RANKLESS_FORM, message_of, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import (
    FORMS,
    WIDTH,
    accumulate,
    assert_same_on_all_ranks,
    rows,
    tanh_layers,
    tied_layers,
)

WORDS = 11


def language_model(sparse: bool = False) -> nn.Sequential:
    torch.manual_seed(5)
    embedding = nn.Embedding(WORDS, WIDTH, sparse=sparse)
    head = nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Tanh(), head)


class AddsEmbedding(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, given: Any) -> tuple[Tensor, Tensor]:
        ids, hidden = given if isinstance(given, tuple) else (given, 0)
        return ids, (hidden + self.embedding(ids)).tanh()


class Second(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[1]


def embeddings() -> nn.Sequential:
    """Three layers have one sparse embedding."""
    torch.manual_seed(6)
    one = nn.Embedding(WORDS, WIDTH, sparse=True)
    return nn.Sequential(*(AddsEmbedding(one) for _ in range(3)), Second())


def words(seed: int, count: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (count,), generator=generator)


class Close:
    """A pipeline and one process, which agree but for rounding."""

    def __init__(
        self,
        make: Callable[[], nn.Sequential],
        schedule: str = "1f1b",
        loss: Any = mse_loss,
        **options: Any,
    ) -> None:
        self.one = make()
        self.pipe = trireme.Pipeline(make(), 4, ranks=True, loss=loss, schedule=schedule, **options)
        self.loss = loss
        self.optimizers = [
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.0)
            for module in (self.one, self.pipe)
            if next(module.parameters(), None) is not None
        ]

    def train(self, x: Tensor, y: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        expected = accumulate(self.one, x, y, chunks=4, loss=self.loss)
        torch.testing.assert_close(self.pipe.step(x, target=y), expected)
        self.assert_close()
        for optimizer in self.optimizers:
            optimizer.step()
        self.assert_close()

    def assert_close(self) -> None:
        whole = dict(self.one.named_parameters(remove_duplicate=False))
        for name, parameter in self.pipe.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(parameter, whole[name])
            got, expected = parameter.grad, whole[name].grad
            assert (got is None) == (expected is None), name
            if got is not None and expected is not None:
                assert got.is_sparse == expected.is_sparse, name
                torch.testing.assert_close(got.to_dense(), expected.to_dense())


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_shm_and_gloo_ranks("world", timeout=120)
def test_shared_weights_train_as_in_one_process(rank: int, world: int) -> None:
    for form in (*FORMS, "zb-h1", "zb-v", "dualpipe-v"):
        both = Close(partial(tied_layers, 16), form)
        for step in range(3):
            both.train(rows(2 * step), rows(2 * step + 1))
            assert_same_on_all_ranks(next(both.pipe.parameters()).grad, list(range(world)))
        assert_same_on_all_ranks(next(both.pipe.parameters()), list(range(world)))


@on_shm_and_gloo_ranks(2, timeout=60)
def test_an_embedding_that_is_the_head_too(rank: int) -> None:
    """A sparse gradient and a dense one make a dense sum, as in one process."""
    for sparse in (False, True):
        both = Close(partial(language_model, sparse), loss=cross_entropy)
        for step in range(3):
            both.train(words(2 * step), words(2 * step + 1))
        weight = both.pipe.get_submodule("0" if rank == 0 else "3").weight
        assert_same_on_all_ranks(weight, [0, 1])


@on_shm_and_gloo_ranks(3, timeout=60)
def test_sparse_gradients_stay_sparse(rank: int) -> None:
    both = Close(embeddings, balance=[1, 1, 2])
    for step in range(3):
        both.train(words(step), rows(step))
        gradient = next(both.pipe.parameters()).grad
        assert gradient is not None and gradient.is_sparse
    assert_same_on_all_ranks(next(both.pipe.parameters()), [0, 1, 2])


@on_shm_ranks(2, timeout=60)
def test_the_same_from_run_to_run(rank: int) -> None:
    def train() -> list[Tensor]:
        pipe = trireme.Pipeline(tied_layers(), 4, ranks=True, loss=mse_loss, schedule="zb-h1")
        optimizer = torch.optim.AdamW(pipe.parameters())
        for step in range(3):
            optimizer.zero_grad()
            pipe.step(rows(step), target=rows(step + 1))
            optimizer.step()
        return [parameter.detach().clone() for parameter in pipe.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(), train(), strict=True))


@on_shm_ranks(2, timeout=60)
def test_gradients_add_up_over_steps(rank: int) -> None:
    both = Close(tied_layers, scale_grads=False)
    for step in range(2):
        x, y = rows(step), rows(step + 1)
        both.pipe.step(x, target=y)
        for part, wanted in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            mse_loss(both.one(part), wanted).backward()
        both.assert_close()


@on_shm_and_gloo_ranks(2, timeout=60)
def test_frozen_and_without_gradients(rank: int) -> None:
    both = Close(tied_layers)
    for module in (both.one, both.pipe):
        next(module.parameters()).requires_grad_(False)
    both.train(rows(1), rows(2))
    assert next(both.pipe.parameters()).grad is None
    for module in (both.one, both.pipe):
        next(module.parameters()).requires_grad_(True)
    both.train(rows(3), rows(4))
    assert next(both.pipe.parameters()).grad is not None


@on_shm_ranks(2, timeout=60)
def test_a_copy_without_a_gradient_gets_that_of_the_others(rank: int) -> None:
    class Ignores(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    def make(is_first: bool) -> nn.Sequential:
        torch.manual_seed(2)
        linear = nn.Linear(WIDTH, WIDTH)
        ignores = Ignores(linear.weight)
        return nn.Sequential(linear, ignores) if is_first else nn.Sequential(ignores, linear)

    for is_first in (True, False):
        both = Close(partial(make, is_first))
        both.train(rows(1), rows(2))
        assert next(both.pipe.parameters()).grad is not None


@on_shm_ranks(3, timeout=60)
def test_clipping_counts_a_shared_parameter_once(rank: int) -> None:
    both = Close(tied_layers)
    both.train(rows(1), rows(2))
    expected = torch.nn.utils.clip_grad_norm_(both.one.parameters(), 0.01)
    torch.testing.assert_close(trireme.clip_grad_norm_(both.pipe, 0.01), expected)
    both.assert_close()


@on_shm_ranks(2, timeout=60)
def test_values_are_those_of_the_first_stage(rank: int) -> None:
    module = tied_layers()
    with torch.no_grad():
        module[0].weight += rank
    pipe = trireme.Pipeline(module, 4, ranks=True, loss=mse_loss)
    assert torch.equal(next(pipe.parameters()), tied_layers()[0].weight)


@on_shm_ranks(2, timeout=60)
def test_other_ranks_layers_on_meta(rank: int) -> None:
    """What is shared must be shared when the pipeline is made: to_empty() makes new parameters."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    own, other = (0, 3) if rank == 0 else (3, 0)
    for i in (own, own + (1 if rank == 0 else -1)):
        module[i].to_empty(device="cpu")
        nn.init.constant_(module[i].weight, 0.1 * i)
        nn.init.zeros_(module[i].bias)
    module[other].weight = module[own].weight
    pipe = trireme.Pipeline(module, 2, ranks=True, loss=mse_loss)
    pipe.step(rows(1), target=rows(2))
    weight = pipe.get_submodule(str(own)).weight
    assert torch.equal(weight, torch.zeros(WIDTH, WIDTH))
    assert_same_on_all_ranks(weight.grad, [0, 1])


@on_shm_ranks(2, timeout=60)
def test_parameters_that_are_replaced_stay_tied(rank: int) -> None:
    both = Close(tied_layers, balance=[4, 4])
    torch.manual_seed(9)
    replaced = torch.randn(WIDTH, WIDTH)
    for module, names in ((both.one, (0, 2, 4, 6)), (both.pipe, ((0, 2), (4, 6))[rank])):
        weight = nn.Parameter(replaced.clone())
        for i in names:
            module.get_submodule(str(i)).weight = weight
    both.optimizers = []
    both.train(rows(1), rows(2))
    if rank == 1:
        del both.pipe.get_submodule("4").weight
        both.pipe.get_submodule("4").register_buffer("weight", torch.zeros(WIDTH, WIDTH))
    with pytest.raises(ValueError, match=r"stage 1 without '4\.weight', which is tied"):
        both.pipe.step(rows(1), target=rows(2))


@on_shm_ranks(2, timeout=60)
def test_a_failed_step_leaves_gradients_as_they_were(rank: int) -> None:
    class Breaks(nn.Module):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise ArithmeticError("the data are broken")
            return x

    def make() -> nn.Sequential:
        return nn.Sequential(*tied_layers(), Breaks())

    both = Close(make)
    both.train(rows(1), rows(2))
    before = [parameter.grad.clone() for parameter in both.pipe.parameters()]
    if rank == 1:
        both.pipe.get_submodule("8").armed = True
    with pytest.raises(RuntimeError, match="the data are broken"):
        both.pipe.step(rows(3), target=rows(4))
    assert all(
        torch.equal(parameter.grad, grad)
        for parameter, grad in zip(both.pipe.parameters(), before, strict=True)
    )
    if rank == 1:
        both.pipe.get_submodule("8").armed = False
    both.train(rows(5), rows(6))


@on_shm_ranks(2, timeout=60)
def test_copies_that_differ_are_named(rank: int) -> None:
    """Whoever freezes, casts or updates one copy alone hears of it; the next step works."""
    both = Close(tied_layers)
    weight = next(both.pipe.parameters())

    def fails(*parts: str) -> None:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            both.pipe.step(rows(1), target=rows(2))
        assert all(part in message_of(caught.value) for part in parts), message_of(caught.value)

    weight.requires_grad_(rank == 0)
    fails("'0.weight'", "'4.weight', which is tied to it", "frozen on rank 1", "on all ranks alike")
    weight.requires_grad_(True)
    both.train(rows(1), rows(2))
    if rank == 1:
        with torch.no_grad():
            weight += 0.5
    fails("'0.weight' on rank 0, and '4.weight', which is tied to it, with other values on rank 1")
    if rank == 1:
        with torch.no_grad():
            weight -= 0.5
    both.train(rows(3), rows(4))


@on_shm_and_gloo_ranks(2, timeout=60)
def test_ranks_that_make_other_modules(rank: int) -> None:
    module = tanh_layers()
    module[0].weight = module[6].weight = nn.Parameter(torch.zeros(WIDTH + rank, WIDTH))
    parts = "'0.weight' and '6.weight', which are one parameter, as Float"
    with raises(ValueError, parts, form=RANKLESS_FORM):
        trireme.Pipeline(module, 4, ranks=True, loss=mse_loss)
    module = tied_layers() if rank == 0 else tanh_layers()
    with raises(ValueError, "tied '0.weight' of stage 0 '4.weight' of stage 1", form=RANKLESS_FORM):
        trireme.Pipeline(module, 4, ranks=True, loss=mse_loss)
    Close(tied_layers).train(rows(1), rows(2))
