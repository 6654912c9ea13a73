"""CachedPrefix in one process: what is taken from the cache, what never is, what is refused."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn import functional

from harness.faults import RANKLESS_FORM, in_case, raises
from pipetransformer.counted_layers import DATA, SAMPLES, Counting, counts, frozen_layers, run


def cache(samples: int = SAMPLES, bytes: int = 1 << 16) -> trireme.ActivationCache:
    return trireme.ActivationCache(samples, bytes)


def some(*ids: int) -> tuple[Tensor, Tensor]:
    numbers = torch.tensor(ids)
    return DATA[numbers], numbers


def test_rows_that_are_there_are_copied() -> None:
    given, kept = frozen_layers(), cache()
    prefix = trireme.CachedPrefix(given, kept, always=True)
    first = prefix(*some(3, 1, 2))
    assert torch.equal(first, run(given, DATA[[3, 1, 2]])) and not first.requires_grad
    given[0].computed()
    again = prefix(*some(2, 3))
    assert torch.equal(again, first[[2, 0]]) and given[0].computed() == 0
    mixed = prefix(*some(1, 5, 3, 9))
    assert given[0].computed() == 2
    assert torch.equal(mixed[[0, 2]], first[[1, 0]])
    torch.testing.assert_close(mixed, run(given, DATA[[1, 5, 3, 9]]))
    assert counts(kept) == (4, 5)
    assert kept.stats().bytes == 5 * 6 * 4 and kept.stats().depth == 3
    again.zero_()  # a copy
    assert torch.equal(prefix(*some(2, 3)), first[[2, 0]])


class Conjugate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, 2 * x).conj()


def test_a_conj_that_torch_has_put_off() -> None:
    prefix = trireme.CachedPrefix([Conjugate()], cache(), always=True)
    assert torch.equal(prefix(*some(1, 2)), prefix(*some(1, 2)))


def test_one_id_twice_in_a_batch() -> None:
    given, kept = frozen_layers(), cache()
    prefix = trireme.CachedPrefix(given, kept)
    for _ in range(2):
        found = prefix(*some(4, 7, 4))
        assert torch.equal(found[0], found[2])
        torch.testing.assert_close(found, run(given, DATA[[4, 7, 4]]))
    assert counts(kept) == (3, 3) and not kept.is_off


def test_ids_above_the_room_are_computed_each_time() -> None:
    given, kept = frozen_layers(1), cache(bytes=5 * 128 + 256)
    prefix = trireme.CachedPrefix(given, kept, always=True)
    for _ in range(3):
        found = prefix(DATA, torch.arange(SAMPLES))
        torch.testing.assert_close(found, run(given, DATA))
    assert 0 < kept.entries < 9
    assert counts(kept) == (2 * kept.entries, 3 * SAMPLES - 2 * kept.entries)


def test_a_prefix_grows_over_the_same_cache() -> None:
    given, kept = frozen_layers(4), cache()
    one, three, all_of_them = (
        trireme.CachedPrefix(given[:count], kept, always=True) for count in (1, 3, 4)
    )
    one(*some(0, 1, 2))
    three(*some(2))
    for layer in given:
        layer.computed()
    found = all_of_them(*some(0, 2, 5))
    torch.testing.assert_close(found, run(given, DATA[[0, 2, 5]]))
    for layer, rows in zip(given, (1, 2, 2, 3), strict=True):
        assert layer.computed() - 3 == rows  # run() has computed three
    assert torch.equal(all_of_them(*some(5, 2, 0)), found[[2, 1, 0]])
    assert given[3].computed() == 0
    # A shallower one never takes what is deeper.
    torch.testing.assert_close(one(*some(0)), run(given[:1], DATA[:1]))


def test_no_stale_value() -> None:
    """What layers return may change in many ways; each is a miss."""

    def write(given: list[Counting]) -> None:
        with torch.no_grad():
            given[1].linear.weight.mul_(1.5)

    def replace(given: list[Counting]) -> None:
        given[0].linear.bias = nn.Parameter(torch.ones(6), requires_grad=False)

    def load(given: list[Counting]) -> None:
        given[2].load_state_dict(Counting().state_dict())

    def set_data(given: list[Counting]) -> None:
        given[2].linear.weight.data = torch.ones(6, 6)

    for change in (write, replace, load, set_data):
        given, kept = frozen_layers(), cache()
        prefix = trireme.CachedPrefix(given, kept, always=True)
        before = prefix(*some(1, 2))
        change(given)
        with in_case(change.__name__):
            for _ in range(2):
                found = prefix(*some(1, 2))
                assert not torch.equal(found, before)
                torch.testing.assert_close(found, run(given, DATA[[1, 2]]))
            assert counts(kept) == (2, 4)


def test_buffers_count() -> None:
    norm = nn.BatchNorm1d(6).eval().requires_grad_(False)
    kept = cache()
    prefix = trireme.CachedPrefix([norm], kept, always=True)
    prefix(*some(1, 2))
    norm.running_mean += 1
    torch.testing.assert_close(prefix(*some(1, 2)), run([norm], DATA[[1, 2]]))
    assert counts(kept) == (0, 4)


def test_layers_without_parameters_are_told_apart() -> None:
    kept = cache()
    for layer in (nn.Tanh(), nn.ReLU(), nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), nn.ELU()):
        found = trireme.CachedPrefix([layer], kept, always=True)(*some(1, 2))
        assert torch.equal(found, layer(DATA[[1, 2]])), layer
    assert counts(kept) == (0, 10)


def test_autocast_counts() -> None:
    given, kept = frozen_layers(), cache()
    prefix = trireme.CachedPrefix(given, kept, always=True)
    plain = prefix(*some(1, 2))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            cast = prefix(*some(1, 2))
            assert cast.dtype == torch.bfloat16
            assert torch.equal(cast, run(given, DATA[[1, 2]]))
    assert torch.equal(prefix(*some(1, 2)), plain)
    assert counts(kept) == (2, 6)


def test_another_input_under_an_id_ends_its_use() -> None:
    given, kept = frozen_layers(), cache()
    prefix = trireme.CachedPrefix(given, kept, always=True)
    prefix(*some(1, 2, 3))
    x, ids = some(1, 2, 3)
    x[1] += 0.5
    text = r"\[cache\] got another input under id 2 than before, so that the cache is off"
    with pytest.warns(UserWarning, match=text):
        found = prefix(x, ids)
    torch.testing.assert_close(found, run(given, x))
    assert kept.is_off
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(prefix(x + 1, ids), run(given, x + 1))
        assert torch.equal(prefix(*some(1)), run(given, DATA[[1]]))
    assert counts(kept) == (2, 8)


def test_another_input_in_one_batch() -> None:
    given, kept = frozen_layers(), cache()
    prefix = trireme.CachedPrefix(given, kept, always=True)
    x, ids = some(1, 2, 1)
    x[2] += 1
    with pytest.warns(UserWarning, match="under id 1 than before"):
        torch.testing.assert_close(prefix(x, ids), run(given, x))


class DropsAlways(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5)


class DropsByTheDefault(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=torch.default_generator)


class LetsAnotherDraw(nn.Module):
    """A loader's thread may draw at any moment."""

    def forward(self, x: Tensor) -> Tensor:
        other = threading.Thread(target=torch.rand, args=(3,))
        other.start()
        other.join()
        return x + 1


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0)


TWO = torch.arange(2)


def call(*given: nn.Module, x: Any = DATA[:2], ids: Any = TWO) -> Any:
    return trireme.CachedPrefix(given, cache())(x, ids)


def in_pipeline_threads() -> None:
    first = trireme.CachedPrefix([DropsAlways()], cache())
    net = nn.Sequential(first, nn.Linear(6, 6))
    pipe = trireme.Pipeline(net, 2, devices=["cpu"] * 2, loss=functional.mse_loss)
    pipe.step(DATA[:4], torch.arange(4), target=DATA[:4])


def growing() -> Iterator[Tensor]:
    prefix = trireme.CachedPrefix([nn.Tanh()], cache())
    for columns in (6, 5):
        yield prefix(DATA[:2, :columns], torch.tensor([columns, columns + 10]))


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no samples": (lambda: cache(0), ValueError, "got 0 samples, expected 1 or more"),
    "no bytes": (lambda: cache(bytes=9), ValueError, "got 9 bytes, expected"),
    "samples of text": (lambda: cache("9"), TypeError, "samples is str"),
    "no room for a row": (
        lambda: trireme.CachedPrefix([nn.Tanh()], cache(bytes=512))(
            torch.ones(2, 500), torch.arange(2)
        ),
        ValueError,
        "got 512 bytes for rows of 2000, expected room for one",
    ),
    "no layers": (lambda: call(), ValueError, "got no layers"),
    "one module": (
        lambda: trireme.CachedPrefix(nn.Linear(2, 2), cache()),
        TypeError,
        "got a Linear as layers",
    ),
    "no cache": (lambda: trireme.CachedPrefix([nn.Tanh()], 3), TypeError, "got int as cache"),
    "no ids": (lambda: call(nn.Tanh(), ids=None), TypeError, "got NoneType as ids"),
    "no input": (lambda: call(nn.Tanh(), x=[1.0]), TypeError, "got list as input"),
    "an id too few": (
        lambda: call(nn.Tanh(), ids=torch.arange(1)),
        ValueError,
        "got ids of Long [1] for 2 rows",
    ),
    "ids of floats": (lambda: call(nn.Tanh(), ids=torch.ones(2)), ValueError, "got ids of Float"),
    "an id above": (
        lambda: call(nn.Tanh(), ids=torch.tensor([0, SAMPLES])),
        ValueError,
        f"got id {SAMPLES}, expected 0 to {SAMPLES - 1}",
    ),
    "an id below": (
        lambda: call(nn.Tanh(), ids=torch.tensor([0, -1])),
        ValueError,
        "got id -1, expected 0 to",
    ),
    "trained": (
        lambda: call(nn.Linear(6, 6)),
        ValueError,
        "got parameter 'layers.0.weight' that is trained",
    ),
    "dropout": (
        lambda: call(nn.Sequential(nn.Dropout(0.5))),
        ValueError,
        "got 'layers.0.0', a Dropout in training mode",
    ),
    "batch norm": (
        lambda: call(nn.Tanh(), nn.BatchNorm1d(6, affine=False)),
        ValueError,
        "got 'layers.1', a BatchNorm1d in training mode",
    ),
    "random numbers": (lambda: call(DropsAlways()), ValueError, "that draw random numbers"),
    "those of the default generator": (
        lambda: call(DropsByTheDefault()),
        ValueError,
        "that draw random numbers",
    ),
    "those of a compiled layer": (
        lambda: call(torch.compile(DropsAlways(), backend="aot_eager")),
        ValueError,
        "that draw random numbers",
    ),
    "random numbers within a pipeline of threads": (
        in_pipeline_threads,
        ValueError,
        "that draw random numbers",
    ),
    "its buffers": (lambda: call(Counts()), ValueError, "that change 'layers.0.calls'"),
    "two outputs": (lambda: call(Pair()), TypeError, "got tuple from the layers"),
    "no rows": (lambda: call(Mean()), ValueError, "do not return a row for each row"),
    "rows of another size": (
        lambda: list(growing()),
        ValueError,
        "got rows of [5], expected [6] as before",
    ),
}


def test_what_it_refuses() -> None:
    for name, (make, kind, text) in REFUSED.items():
        with in_case(name), raises(kind, "[cache]", text, form=RANKLESS_FORM):
            make()
    for way in (copy.deepcopy, pickle.dumps):
        with raises(TypeError, "got a copy or a pickle of an ActivationCache", form=RANKLESS_FORM):
            way(cache())


def test_harmless_layers_in_training_mode_are_welcome() -> None:
    call(nn.Dropout(0.0).train(), nn.LayerNorm(6).requires_grad_(False).train())


def test_other_threads_may_draw() -> None:
    before = torch.get_rng_state()
    assert torch.equal(call(LetsAnotherDraw()), DATA[:2] + 1)
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_mode_is_looked_at_in_each_use() -> None:
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).requires_grad_(False).eval()
    prefix = trireme.CachedPrefix([nn.Tanh(), layer], cache())
    layer[0].train()  # does the same in both modes
    for _ in range(2):
        prefix(*some(1, 2))
    layer[1].train()
    with raises(ValueError, "got 'layers.1.1', a Dropout in training mode", form=RANKLESS_FORM):
        prefix(*some(1, 2))
    layer[1] = nn.Identity()
    torch.testing.assert_close(prefix(*some(1, 2)), run([nn.Tanh(), layer], DATA[[1, 2]]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_module_of_torchscript_is_looked_at_in_python() -> None:
    layer = torch.jit.script(nn.Linear(6, 6).requires_grad_(False))
    kept = cache()
    prefix = trireme.CachedPrefix([layer], kept, always=True)
    for _ in range(2):
        torch.testing.assert_close(prefix(*some(1, 2)), run([layer], DATA[[1, 2]]))
    assert counts(kept) == (2, 2)
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(prefix(*some(1, 2)), run([layer], DATA[[1, 2]]))
    assert counts(kept) == (2, 4)


def test_what_costs_more_to_read_is_not_stored() -> None:
    """A copy is dearer than nothing: from the eighth call on nothing is stored, unless asked."""
    x = torch.ones(4, 1 << 14)
    for always in (False, True):
        kept = trireme.ActivationCache(400, 400 << 17)
        prefix = trireme.CachedPrefix([nn.Identity()], kept, always=always)
        for number in range(20):
            prefix(x, torch.arange(4) + 4 * number)
        stored = kept.stats().bytes // (4 << 16)
        assert stored == (20 if always else 7)


def test_it_trains_as_without_it() -> None:
    """Losses with the cache on and off."""
    reached = []
    for use in (False, True):
        torch.manual_seed(4)
        front, rest = frozen_layers(2), nn.Linear(6, 3)
        prefix = trireme.CachedPrefix(front, cache())
        optimizer = torch.optim.AdamW(rest.parameters(), lr=0.01)
        for step in range(60):
            ids = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:8]
            hidden = prefix(DATA[ids], ids) if use else run(front, DATA[ids])
            loss = rest(hidden).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reached.append(loss.item())
    assert reached[0] == pytest.approx(reached[1], rel=1e-5)
