"""``python -m trireme doctor``: which rank of which job on this host is where, and who hangs."""

import argparse
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from trireme import _C
from trireme._core.durations import LONGEST_WAIT

Found = dict[str, Any]

RIGHTS = (
    "Run this as the user of the job or as root; in a container, inside of it or with the "
    "capability SYS_PTRACE."
)
YAMA = (
    "Run this as root, or allow it to look at the processes of its own user: "
    "sysctl kernel.yama.ptrace_scope=0."
)


def add_doctor(commands: Any) -> None:
    """The subcommand and its options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="who is where: ranks of this host that hang, stopped or died",
        description=(
            "Looks at every group of ranks that shares memory on this host, from outside: the "
            "ranks may hang, be stopped or dead. Exit code 0: all is well, or there is no group; "
            "1: a rank is dead, stopped, failed or waited for too long; 2: nothing could be read."
        ),
    )
    parser.add_argument("pids", metavar="PID", nargs="*", type=int, help="only groups of these")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--history", metavar="N", type=int, default=1, help="last operations per rank, up to 64"
    )
    parser.add_argument(
        "--patience",
        metavar="S",
        type=_patience,
        default=timedelta(seconds=5),
        help="seconds that a rank may be waited for until that is a hang (default 5)",
    )


def _patience(seconds: str) -> timedelta:
    if not float(seconds) >= 0:  # nan is not
        raise argparse.ArgumentTypeError(f"got {seconds}, expected 0 seconds or more")
    return timedelta(seconds=min(float(seconds), LONGEST_WAIT.total_seconds()))


def examine(arguments: argparse.Namespace) -> int:
    """Prints what was found; returns the exit code."""
    found: Found = _C.examine_host(arguments.pids, arguments.patience, arguments.history)
    if arguments.pids:  # about others nobody asked
        found["hidden"] = [
            process for process in found["hidden"] if process["pid"] in arguments.pids
        ]
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found, arguments)))
    if not all(group["is_well"] for group in found["groups"]):
        return 1
    unread = found["sealed"] or (arguments.pids and found["hidden"])
    return 2 if unread and not found["groups"] else 0


def _lines(found: Found, arguments: argparse.Namespace) -> list[str]:
    lines = []
    groups = found["groups"]
    for number, group in enumerate(groups, 1):
        lines += [*_group_lines(group, f"group {number} of {len(groups)}"), ""]
    if not groups:
        of_whom = f" of process {_list(arguments.pids)}" if arguments.pids else ""
        lines.append(f"no Trireme group{of_whom} on this host")
    if found["hidden"] and (arguments.pids or not groups):
        lines.append(_refusal("may not look at", found["hidden"], RIGHTS))
    if found["sealed"]:
        lines.append(_refusal("may not read the memory of", found["sealed"], YAMA))
    return lines


def _refusal(what: str, processes: Sequence[Found], next_step: str) -> str:
    pids = [process["pid"] for process in processes]
    who = f"process {_list(pids)}" if len(pids) <= 8 else f"{len(pids)} processes of others"
    why = processes[0]["why"]
    return f"[doctor] {what} {who} ({why}) as user {os.geteuid()}. {next_step}"


def _list(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids))


def _group_lines(group: Found, title: str) -> list[str]:
    ranks = group["ranks"]
    lines = [f"{title}: {len(ranks)} of {group['world']} ranks seen on this host"]
    commands = {_command_of(rank): None for rank in ranks if rank["command"]}
    lines += [f"  {command}" for command in commands]
    for rank in ranks:
        lines.append(
            f"  rank {rank['rank']:<3} process {rank['pid']:<8} {rank['process']:<9} "
            f"{rank['state']:<7} "
            + (f"{rank['step']}; " if rank["step"] else "")
            + _last_of(rank)
            + (f"; {rank['behind']} behind" if rank["behind"] else "")
            + (
                f"; waits {rank['waits_s']:.1f} s for {rank['waits_for']}"
                if rank["waits_for"]
                else ""
            )
        )
        for reason in ("failure", "abandoned"):
            if rank[reason]:
                lines.append(f"      {reason}: {rank[reason]}")
        lines += [f"      {_operation_text(operation)}" for operation in rank["operations"][1:]]
    sign = "ok" if group["is_well"] else "TROUBLE"
    return [*lines, f"  {sign}: {group['verdict']}", *_next_steps(group)]


def _command_of(rank: Found) -> str:
    folder = f"   (in {rank['folder']})" if rank["folder"] else ""
    return f"{rank['command']}{folder}"


def _last_of(rank: Found) -> str:
    if rank["deposits"]:
        return str(rank["deposits"])
    return _operation_text(rank["operations"][0]) if rank["operations"] else "no collective yet"


def _next_steps(group: Found) -> list[str]:
    """What shows where a rank is that others wait for, or lets it go on."""
    by_pid = {rank["pid"]: rank for rank in group["ranks"]}
    steps = []
    for pid in group["suspects"][:3]:
        rank = by_pid[pid]
        if rank["process"] == "stopped":
            steps.append(f"kill -CONT {pid}   (rank {rank['rank']} goes on)")
        elif "python" in rank["command"].split(" ")[0]:
            steps.append(f"py-spy dump --pid {pid}   (where rank {rank['rank']} is)")
        else:
            steps.append(f"gdb -p {pid} -batch -ex 'thread apply all bt'")
    return [f"  next: {step}" for step in steps]


def _operation_text(operation: Found) -> str:
    what = f"collective {operation['sequence']}, {operation['operation']}"
    started, finished = operation["started_s_ago"], operation["finished_s_ago"]
    if finished is None:
        return f"in {what}, for {started:.1f} s"
    return f"finished {what}, {finished:.1f} s ago, after {(started - finished) * 1e3:.2f} ms"
