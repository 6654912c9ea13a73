"""Schedules as values, beside the tables of torch's own classes: no process is started."""

import csv
import io
import itertools
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trireme
from torch.distributed.pipelining import schedules
from trireme import PipelineSchedule, pipeline_schedule

COMPUTE = {"F", "B", "I", "W", "OVERLAP_F_B"}
RANKS = range(2, 9)
MICRO_BATCHES = range(1, 33)

# Our name, torch's class, stages per rank, ranks.
FORMS = [
    ("gpipe", schedules.ScheduleGPipe, 1, RANKS),
    ("1f1b", schedules.Schedule1F1B, 1, RANKS),
    ("interleaved-1f1b", schedules.ScheduleInterleaved1F1B, 2, RANKS),
    ("interleaved-1f1b", schedules.ScheduleInterleaved1F1B, 3, range(2, 6)),
    ("looped-bfs", schedules.ScheduleLoopedBFS, 2, RANKS),
    ("zb-h1", schedules.ScheduleInterleavedZeroBubble, 1, RANKS),
    ("zb-h1", schedules.ScheduleInterleavedZeroBubble, 2, RANKS),
    ("zb-h1", schedules.ScheduleInterleavedZeroBubble, 3, range(2, 6)),
    ("zb-v", schedules.ScheduleZBVZeroBubble, 2, RANKS),
    ("dualpipe-v", schedules.ScheduleDualPipeV, 2, RANKS),
]
IDS = [f"{name}-{stages}" for name, _, stages, _ in FORMS]


def torch_accepts(name: str, ranks: int, micro_batches: int) -> bool:
    """What the constructors of torch's classes ask of the numbers."""
    if name in ("interleaved-1f1b", "zb-h1"):
        return micro_batches % max(1, micro_batches // ranks) == 0
    least = {"1f1b": ranks, "dualpipe-v": 2 * ranks}
    return micro_batches >= least.get(name, 1)


def torch_rows(kind: Any, ranks: int, local_stages: int, micro_batches: int) -> list[list[Any]]:
    """The table of a class, made from the attributes that its functions read."""
    made = kind.__new__(kind)
    made.pp_group_size = ranks
    made.num_stages = made._num_stages = ranks * local_stages
    made._n_microbatches = micro_batches
    made._stages = [None] * local_stages
    made.n_local_stages = local_stages
    made.number_of_rounds = max(1, micro_batches // ranks)
    made.microbatches_per_round = micro_batches // made.number_of_rounds
    if issubclass(kind, schedules.PipelineScheduleSingle):
        order = made._get_pipeline_order()
        return [order[rank] for rank in range(ranks)]
    return [made._calculate_single_rank_operations(rank) for rank in range(ranks)]


def compute_texts(row: list[Any]) -> list[str]:
    return [
        str(action)
        for action in row
        if action is not None and action.computation_type.value in COMPUTE
    ]


def expected_row(name: str, rank: int, row: list[Any], ranks: int, micro_batches: int) -> list[str]:
    if name == "looped-bfs":  # the one deliberate difference
        row = [
            action._replace(microbatch_index=micro_batches - 1 - action.microbatch_index)
            if action is not None and action.computation_type.value == "B"
            else action
            for action in row
        ]
    if name == "1f1b" and rank == ranks - 1:
        # What torch shows counts the forwards of the last rank from 1; what it runs does not.
        row = [
            action._replace(microbatch_index=action.microbatch_index - 1)
            if action is not None and action.computation_type.value == "F"
            else action
            for action in row
        ]
    return compute_texts(row)


def numbers(name: str, ranks: range) -> Iterator[tuple[int, int]]:
    for count, micro_batches in itertools.product(ranks, MICRO_BATCHES):
        if torch_accepts(name, count, micro_batches):
            yield count, micro_batches


@pytest.mark.parametrize(("name", "kind", "stages", "ranks"), FORMS, ids=IDS)
def test_tables_are_torchs(name: str, kind: Any, stages: int, ranks: range) -> None:
    seen = 0
    for count, micro_batches in numbers(name, ranks):
        ours = pipeline_schedule(
            name, ranks=count, micro_batches=micro_batches, stages_per_rank=stages
        )
        theirs = torch_rows(kind, count, stages, micro_batches)
        for rank, line in enumerate(ours.to_csv().splitlines()):
            expected = expected_row(name, rank, theirs[rank], count, micro_batches)
            assert line.split(",") == expected, (count, micro_batches, rank)
            seen += 1
    assert seen > 100


def test_numbers_that_torch_refuses_work() -> None:
    left_out = [
        (name, ranks, micro_batches)
        for name, _, _, _ in FORMS
        for ranks, micro_batches in itertools.product(RANKS, MICRO_BATCHES)
        if not torch_accepts(name, ranks, micro_batches)
    ]
    assert {name for name, _, _ in left_out} == {"1f1b", "interleaved-1f1b", "zb-h1", "dualpipe-v"}
    for name, ranks, micro_batches in left_out:
        made = pipeline_schedule(name, ranks=ranks, micro_batches=micro_batches)
        assert made.micro_batches == micro_batches


def to_text(rows: list[list[Any]]) -> str:
    """As torch's _dump_csv() writes rows."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


# Torch writes no table of the first two.
@pytest.mark.parametrize(("kind", "stages"), [form[1:3] for form in FORMS[2:]], ids=IDS[2:])
def test_tables_of_torch_come_back_as_they_were(kind: Any, stages: int) -> None:
    rows = torch_rows(kind, 4, stages, 8)
    read = PipelineSchedule.from_csv(to_text(rows))
    cells = [[None if action is None else str(action) for action in row] for row in rows]
    assert [
        [None if action is None else str(action) for action in row] for row in read.rows
    ] == cells
    assert list(csv.reader(io.StringIO(read.to_csv()))) == [
        [cell or "" for cell in row] for row in cells
    ]


def torch_runtime(schedule: PipelineSchedule) -> Any:
    kind = schedules._PipelineScheduleRuntime
    made = kind.__new__(kind)
    made.pp_group_size = schedule.ranks
    made._num_stages = schedule.stages
    made._n_microbatches = schedule.micro_batches
    made._stages = []
    made.pipeline_order = {}
    made._defer_pp_recv = False
    made._max_active_stages = 3
    made._unshard_lookahead = "full"
    made._defer_reduce_grad_wait = False
    made._max_outstanding_sends = None
    return made


@pytest.mark.skipif(
    not hasattr(schedules, "_add_wait_send"), reason="torch before 2.15 lowers without waits"
)
@pytest.mark.parametrize("micro_batches", [3, 8, 11])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", sorted({name for name, _, _, _ in FORMS} | {"zb-auto"}))
def test_lowering_is_torchs(name: str, ranks: int, micro_batches: int, tmp_path: Path) -> None:
    ours = pipeline_schedule(name, ranks=ranks, micro_batches=micro_batches)
    table = tmp_path / "table.csv"
    table.write_text(ours.to_csv())
    runtime = torch_runtime(ours)
    runtime._load_csv(str(table), format="compute_only")
    theirs = [",".join(map(str, row)) for row in runtime.pipeline_order_with_comms.values()]
    lowered = ours.to_csv("compute_comms")
    assert lowered.splitlines() == theirs

    dumped = tmp_path / "dumped.csv"
    runtime._dump_csv(str(dumped), format="compute_comms")
    read = PipelineSchedule.from_csv(dumped.read_text())
    assert read.to_csv("compute_comms") == lowered
    assert read.to_csv() == ours.to_csv()
    table.write_text(lowered)
    torch_runtime(ours)._load_csv(str(table), format="compute_comms")


def test_five_stages_on_a_rank_are_unsharded_as_torch_does(tmp_path: Path) -> None:
    ours = pipeline_schedule("looped-bfs", ranks=2, micro_batches=3, stages_per_rank=5)
    row = ours.to_csv("compute_comms").splitlines()[0].split(",")
    theirs = schedules._add_unshard_reshard(
        [schedules._Action.from_str(part) for part in ours.to_csv().splitlines()[0].split(",")]
    )
    kept = ("UNSHARD", "RESHARD", *COMPUTE)
    assert [
        action for action in row if action.lstrip("0123456789").rstrip("0123456789") in kept
    ] == [str(action) for action in theirs]


def test_a_value_says_what_it_is() -> None:
    schedule = pipeline_schedule("1f1b", ranks=2, micro_batches=2)
    assert repr(schedule) == "PipelineSchedule(ranks=2, stages=2, micro_batches=2)"
    assert schedule.stage_rank == [0, 1]
    assert str(schedule).splitlines()[1] == "rank 0  0F0 0F1   .   . 0B0   -   . 0B1   -"
    first = schedule.rows[1][0]
    assert first is not None
    assert (str(first), first.stage, first.kind, first.micro_batch) == ("1F0", 1, "F", 0)
    assert first == schedule.rows[1][0] != schedule.rows[1][1]
    assert len({first, schedule.rows[1][0]}) == 1
    assert (
        schedule
        == pipeline_schedule(schedule.to_csv())
        != pipeline_schedule("gpipe", ranks=2, micro_batches=2)
    )
    assert schedule.check() == {(0, 1): 2, (1, 0): 1}
    overlap = pipeline_schedule("dualpipe-v", ranks=2, micro_batches=4).rows[0][7]
    assert overlap is not None
    assert (overlap.kind, overlap.stage, overlap.micro_batch) == ("OVERLAP_F_B", None, None)
    assert [str(part) for part in overlap.sub_actions] == ["0F3", "3B1"]


def test_figures() -> None:
    schedule = pipeline_schedule("1f1b", ranks=4, micro_batches=8)
    assert schedule.bubble() == pytest.approx(3 / 11)
    assert schedule.bubble(forward=2, input=1, weight=3) == pytest.approx(3 / 11)
    assert schedule.makespan() == 33
    assert schedule.makespan(forward=[1, 1, 1, 2], message=0.5) > 33
    assert [schedule.peak_activations(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert schedule.peak_messages((0, 1)) == schedule.check()[0, 1]


Times = dict[tuple[str, int, int], float]


def simulated(schedule: PipelineSchedule, slots: dict[tuple[int, int], int]) -> Times | None:
    """When each action ends, with so many slots on the edges named; None where that never ends."""
    holder, done = schedule.stage_rank, Times()
    sent: dict[tuple[int, int], list[int]] = {}
    todo: list[list[list[tuple[str, int, int]]]] = [[] for _ in schedule.rows]
    for rank, row in enumerate(schedule.rows):
        for action in filter(None, row):
            parts = action.sub_actions or [action]
            todo[rank].append(
                [(part.kind, part.stage or 0, part.micro_batch or 0) for part in parts]
            )
            for kind, stage, micro_batch in todo[rank][-1][:]:
                to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind, -1)
                if 0 <= to < schedule.stages and holder[to] != rank:
                    edge = sent.setdefault((stage, to), [])
                    edge.append(micro_batch)
                    todo[rank].append([(f"to {to}", stage, micro_batch)])

    def ended(kinds: str, stage: int, micro_batch: int) -> float | None:
        return next(
            (done[k, stage, micro_batch] for k in kinds if (k, stage, micro_batch) in done), None
        )

    def ready(kind: str, stage: int, micro_batch: int) -> float | None:
        if kind == "W":
            return ended("I", stage, micro_batch)
        if kind.startswith("to "):
            to = int(kind[3:])
            edge = sent[stage, to]
            before = edge.index(micro_batch) - slots.get((stage, to), len(edge))
            return 0 if before < 0 else ended("BW", to, edge[before])
        other = stage - 1 if kind == "F" else stage + 1
        if not 0 <= other < schedule.stages:
            return 0
        if holder[other] == holder[stage]:
            return ended("F" if kind == "F" else "BI", other, micro_batch)
        return done.get((f"to {stage}", other, micro_batch))

    free, at, moved = [0.0] * len(todo), [0] * len(todo), True
    while moved:
        moved = False
        for rank, groups in enumerate(todo):
            while at[rank] < len(groups):
                begins = [ready(*group) for group in groups[at[rank]]]
                if None in begins:
                    break
                free[rank] = max([free[rank], *(begin for begin in begins if begin is not None)])
                for group in groups[at[rank]]:
                    free[rank] += {"F": 1, "I": 1, "W": 1, "B": 2}.get(group[0], 0)
                    done[group] = free[rank]
                at[rank], moved = at[rank] + 1, True
    return done if all(i == len(groups) for i, groups in zip(at, todo, strict=True)) else None


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 3), (3, 8), (4, 5)])
@pytest.mark.parametrize("name", sorted({name for name, _, _, _ in FORMS} | {"zb-auto"}))
def test_times_and_slots_are_those_of_a_simulation(
    name: str, ranks: int, micro_batches: int
) -> None:
    schedule = pipeline_schedule(name, ranks=ranks, micro_batches=micro_batches)
    times = simulated(schedule, {})
    assert times is not None
    assert schedule.makespan() == max(times.values())
    work = 3 * micro_batches * schedule.stages
    assert schedule.bubble() == pytest.approx(1 - work / (ranks * schedule.makespan()))

    slots = schedule.check()
    assert simulated(schedule, slots) == times
    for edge, count in slots.items():  # one slot less, and something ends later
        assert count == 1 or simulated(schedule, {**slots, edge: count - 1}) != times


def test_large_tables_are_checked_in_less_than_a_second() -> None:
    for name in sorted({name for name, _, _, _ in FORMS}):
        schedule = pipeline_schedule(name, ranks=64, micro_batches=512)
        begin = time.process_time()
        schedule.check()
        assert time.process_time() - begin < 1  # takes 0.01 to 0.04 s


def test_values_can_be_kept_and_sent() -> None:
    schedule = pipeline_schedule("dualpipe-v", ranks=2, micro_batches=4)
    lowered = PipelineSchedule.from_csv(schedule.to_csv("compute_comms"))
    for table in (schedule, lowered, PipelineSchedule.from_csv("0F0,,0B0\n,1F0,1B0,\n")):
        back = pickle.loads(pickle.dumps(table))
        assert back == table
        assert {table: 1}[back] == 1
    assert schedule != lowered


@pytest.mark.parametrize("text", ["\udcff0F0,0B0", "0F0,0B\u0660", "\0", "\u00e4,\U0001f600\n"])
def test_letters_of_all_kinds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\[pipeline\] got '.*' in row 1, column"):
        PipelineSchedule.from_csv(text)


def test_zb_auto_takes_costs_and_a_limit() -> None:
    costs = {"forward": [1.0, 2.0, 1.0], "weight": 0.5, "message": 0.1}
    made = pipeline_schedule("zb-auto", ranks=3, micro_batches=6, costs=costs, max_activations=3)
    assert max(map(made.peak_activations, range(3))) <= 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name_or_text": "zb-h2"}, "expected one of gpipe, 1f1b, interleaved-1f1b"),
        ({"ranks": 0}, "got 0 ranks"),
        ({"micro_batches": None}, "without ranks or micro_batches"),
        ({"costs": {}}, "whose order depends on neither"),
        ({"name_or_text": "zb-auto", "costs": {"foward": 1}}, "got costs of foward"),
        ({"name_or_text": "zb-auto", "costs": {"forward": [1, 1, 1]}}, "got costs for 3 stages"),
        ({"name_or_text": "zb-auto", "max_activations": 0}, "got a limit of 0 live activations"),
        ({"name_or_text": "0F0,0B0\n1F0,1C0\n"}, "row 2, column 2"),
        ({"name_or_text": "0F0,0B0\n1F0,1B0\n"}, "got a table of 1 micro-batches, expected 4"),
        ({"name_or_text": "0F0,0B0\n", "costs": {}}, "beside a table"),
    ],
)
def test_bad_input(arguments: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"name_or_text": "1f1b", "ranks": 2, "micro_batches": 4}
    with pytest.raises(ValueError, match=text) as caught:
        pipeline_schedule(**{**given, **arguments})
    assert str(caught.value).startswith("[pipeline] ")


def test_numbers_of_another_type() -> None:
    with pytest.raises(TypeError, match="ranks is float"):
        pipeline_schedule("1f1b", ranks=2.0, micro_batches=4)  # type: ignore[arg-type]


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pipeline_schedule("dualpipe-v", ranks=2, micro_batches=4).plot(tmp_path / "table.svg")
    assert "3F0" in (tmp_path / "table.svg").read_text()


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"\[pipeline\] found no matplotlib"):
        pipeline_schedule("gpipe", ranks=2, micro_batches=2).plot(tmp_path / "table.svg")


def test_partition() -> None:
    assert trireme.partition([1.0] * 7, 3) == [3, 2, 2]
    assert trireme.partition([5, 1, 1, 1, 1], 2) == [1, 4]
    assert trireme.partition([1, 1, 1, 9], 3, memory=[4, 4, 4, 1], limit=8) == [2, 1, 1]
    for arguments, text in (
        (([1.0], 2), "got 1 layers for 2 parts"),
        (([1.0, -1.0], 1), "expected a finite number"),
    ):
        with pytest.raises(ValueError, match=text):
            trireme.partition(*arguments)
    with pytest.raises(ValueError, match="expected at least 3 parts"):
        trireme.partition([1] * 3, 2, memory=[3] * 3, limit=5)
    with pytest.raises(ValueError, match="got bytes for 0 layers, expected 1"):
        trireme.partition([1.0], 1, limit=3)
    with pytest.raises(ValueError, match="without a limit"):
        trireme.partition([1.0], 1, memory=[3])
