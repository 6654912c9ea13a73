"""Writes the figures by which the pages explain their tables: what no strategy could beat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from measure import pages
from measure.pages import Blocks, Json
from readme_steps import contests


def _line(text: str, cases: Iterator[str]) -> Blocks:
    """Yields the line if there is a case."""
    if found := "; ".join(cases):
        yield text.format(cases=found)


def idle_ranks(ours: str) -> Callable[[Json], Blocks]:
    """Returns what writes the time of ranks that never talk beside sides that `ours` missed."""

    def line(results: Json) -> Blocks:
        yield from _line(
            "Where a target is missed, 2 ranks that synchronize nothing take this part of the time "
            "of what is measured against: {cases}.",
            (
                f"{contest['steps']['no sync'] / contest['steps'][contest['theirs']]:.2f} of "
                f"{contest['theirs']} (`{contest['workload']}`, target "
                f"{contest['ratio']['target']:g})"
                for contest in contests(results, ours)
                if contest["ratio"]["verdict"] == "missed" and "no sync" in contest["steps"]
            ),
        )

    return line


def added_by_averaging(results: Json) -> Blocks:
    """Yields what DDP adds to a step of ranks that never talk."""
    workloads = results.get("workloads", {})
    steps = {name: pages.steps_of(workload) for name, workload in workloads.items()}
    yield from _line(
        "A step of DDP takes longer than one of ranks that never talk by {cases}.",
        (
            f"{taken['ddp'] - taken['no sync']:.0f} ms (`{name}`)"
            for name, taken in steps.items()
            if "ddp" in taken and "no sync" in taken
        ),
    )


def added_per_gradient(results: Json) -> Blocks:
    """Yields what the reducer alone adds to a gradient, beside torch's fastest option set."""
    runs = results.get("reducer", {}).get("runs", {})
    added = {  # ms for the 1,000 parameters of bench_overheads.py, so us for one
        label: statistics.median(run["wrapped_ms"] - run["bare_ms"] for run in sides)
        for label, sides in runs.items()
    }
    yield from _line(
        "The reducer alone, with 1,000 tiny gradients and no communication, adds per gradient "
        "{cases}.",
        (
            f"{added[contest['ours']]:.1f} us ({contest['ours']}) beside "
            f"{added[contest['theirs']]:.1f} us ({contest['theirs']}), ratio "
            f"{contest['ratio']['median']:.2f}, target {contest['ratio']['target']:g}"
            for contest in results.get("reducer", {}).get("contests", ())
        ),
    )


def pipeline_bounds(results: Json) -> Blocks:
    """Yields how long the arithmetic of a pipeline takes where it missed its target."""
    steps = results.get("steps", {})
    bubbles = {
        (row["workload"], row["schedule"]): row["computed"] for row in steps.get("bubbles", ())
    }

    def missed() -> Iterator[str]:
        for row in steps.get("rows", ()):
            bubble = bubbles.get((row["workload"], row["schedule"]))
            if row["ratio"]["verdict"] == "missed" and bubble is not None:
                least = row["one_thread_ms"] / 2 / (1 - bubble)
                yield (
                    f"`{row['workload']}` under `{row['schedule']}` {least:.0f} ms, which is "
                    f"{least / row['torch_ms']:.2f} of torch's time"
                )

    def small() -> Iterator[str]:
        for row in results.get("small", ()):
            if row["ratio"]["verdict"] == "missed":
                yield f"{row['one_thread_ms'] / 2 / row['torch_ms']:.2f} under `{row['schedule']}`"

    yield from _line(
        "Arithmetic alone, half the time of one thread divided by one less the computed bubble, "
        "takes: {cases}.",
        missed(),
    )
    yield from _line(
        "With layers of `Linear(8, 8)` half the time of one thread is this part of torch's: "
        "{cases}.",
        small(),
    )


def remote_bounds(results: Json) -> Blocks:
    """Yields what being remote adds to a layer, here and in torch RPC."""
    if not (found := results.get("module")):
        return
    ours, rpc, local = (
        statistics.median(found["times_us"][side]) for side in ("ours", "rpc", "local")
    )
    yield (
        f"The layer alone takes {local / rpc:.2f} of RPC's time. Being remote adds "
        f"{(ours - local) / 1000:.1f} ms to it here and {(rpc - local) / 1000:.1f} ms in RPC, a "
        f"ratio of {(ours - local) / (rpc - local):.2f}."
    )
