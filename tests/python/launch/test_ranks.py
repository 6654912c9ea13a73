"""all_mean, rank_generator and the logger."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme

from harness.ranks import run_ranks


def means(rank: int) -> list[Any]:
    with trireme.init(device="cpu"):
        matrix = torch.arange(6.0).view(2, 3).t() * (rank + 1)  # not contiguous
        matrix.requires_grad_()
        return [
            trireme.all_mean(rank + 1),
            trireme.all_mean(rank == 0),
            trireme.all_mean(matrix),
            trireme.all_mean(torch.tensor([60000.0], dtype=torch.float16)),
            trireme.all_mean(torch.tensor([1, 2 * rank])),
            trireme.all_mean(torch.tensor(complex(0, rank))),
            trireme.all_mean(torch.zeros(0)),
            matrix[2, 1].item(),
        ]


def test_all_mean_over_two_ranks() -> None:
    for rank, result in enumerate(run_ranks(means, 2)):
        number, truth, matrix, half, integers, imaginary, nothing, untouched = result
        assert number == 1.5 and isinstance(number, float)
        assert truth == 0.5
        torch.testing.assert_close(matrix, torch.arange(6.0).view(2, 3).t() * 1.5)
        assert not matrix.requires_grad
        assert half.dtype == torch.float16 and half.item() == 60000  # their sum would be infinite
        torch.testing.assert_close(integers, torch.tensor([1.0, 1.0]))
        assert imaginary.item() == 0.5j
        assert nothing.shape == (0,)
        assert untouched == 5 * (rank + 1)


def mean_of_a_part(rank: int) -> float | str:
    with trireme.init(device="cpu"):
        group = dist.new_group([1, 2])
        if rank > 0:
            return trireme.all_mean(rank, group)
        try:
            trireme.all_mean(rank, group)
        except TypeError as error:
            return str(error)
        return "accepted"


def test_all_mean_over_a_group() -> None:
    outsider, *members = run_ranks(mean_of_a_part, 3)
    assert members == [1.5, 1.5]
    assert "[launch] group is int, expected a ProcessGroup (rank 0 of 3)" in outsider


def test_all_mean_refuses_what_has_no_mean(lone_rank: trireme.Context) -> None:
    for value in ("1", None, [1.0], 1j):
        with pytest.raises(TypeError, match=r"\[launch\] all_mean got \w+, expected a real number"):
            trireme.all_mean(value)
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo, expected torch\.strided"):
        trireme.all_mean(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="group is str, expected a ProcessGroup"):
        trireme.all_mean(1.0, "everybody")


def draws(rank: int, seed: int) -> list[int]:
    with trireme.init(device="cpu"):
        generator = trireme.rank_generator(seed)
        return torch.randint(2**31, (4,), generator=generator).tolist()


def test_rank_generator_differs_between_ranks_and_not_between_runs() -> None:
    first = run_ranks(draws, 2, 7)
    assert first == run_ranks(draws, 2, 7)
    next_seed = run_ranks(draws, 2, 8)
    every_stream = [*first, *next_seed]
    assert len({tuple(stream) for stream in every_stream}) == 4


def test_rank_generator_takes_every_seed(lone_rank: trireme.Context) -> None:
    for seed in (0, -1, 2**63, 2**64 - 1, 2**70):
        trireme.rank_generator(seed)
    # The bits beyond torch's 64 count, too.
    seeds = {trireme.rank_generator(seed).initial_seed() for seed in (0, 2**64, 2**65, -(2**70))}
    assert len(seeds) == 4
    for seed in ("7", 7.0, True, None):
        with pytest.raises(TypeError, match=r"\[launch\] seed is \w+, expected int"):
            trireme.rank_generator(seed)


def test_before_init_both_say_so() -> None:
    for call in (lambda: trireme.all_mean(1.0), lambda: trireme.rank_generator(0)):
        with pytest.raises(ValueError, match=r"was called before init\(\)\. Call trireme.init\(\)"):
            call()


class Lines(logging.Handler):
    """Collects what the handler of the logger would print."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def write(self, text: str) -> None:
        self.lines.append(text)

    def flush(self) -> None:
        pass


def log_lines(rank: int) -> list[str]:
    log = trireme.get_logger()
    lines = Lines()
    log.handlers[0].setStream(lines)  # type: ignore[attr-defined]
    log.info("before")
    with trireme.init(device="cpu"):
        log.debug("never")
        log.info("news")
        trireme.get_logger("data").info("news of a part")
        trireme.get_logger("trireme.data").warning("trouble")
    return "".join(lines.lines).splitlines()


def test_the_log_has_news_from_rank_0_and_trouble_from_all() -> None:
    rank_0, rank_1 = run_ranks(log_lines, 2, fresh=True)  # it turns the log elsewhere
    assert rank_0 == ["[0/2] before", "[0/2] news", "[0/2] news of a part", "[0/2] trouble"]
    assert rank_1 == ["[1/2] trouble"]


def test_the_log_works_in_a_broken_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("RANK", "0")
    log = trireme.get_logger()
    lines = Lines()
    stream = log.handlers[0].setStream(lines)  # type: ignore[attr-defined]
    try:
        log.info("still here")
    finally:
        log.handlers[0].setStream(stream)  # type: ignore[attr-defined]
    assert "".join(lines.lines) == "[0/1] still here\n"
    assert trireme.get_logger() is log and len(log.handlers) == 1
