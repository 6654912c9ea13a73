"""A timeline of operations in the format of Chrome's trace viewer: ``chrome://tracing``."""

from __future__ import annotations

import json
import threading
import time
from typing import Any


def _lane_name(kind: str, name: str) -> str:
    """Returns "allreduce.gradient", as Horovod calls a tensor; an unnamed one is called so."""
    prefix = f"{kind}."
    return name if name.startswith(prefix) else prefix + name


class Timeline:
    """Writes a file. Each name of an operation has a lane of its own. Thread-safe."""

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self.path, self._marks_cycles = path, mark_cycles
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115, until stop()
        self._lock = threading.Lock()
        self._began_ns = time.monotonic_ns()
        self._lanes: dict[str, int] = {}
        self._is_first = True
        self._is_over = False
        self._file.write("[")
        began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._write({"name": "process_name", "ph": "M", "args": {"name": "hvd"} | began})

    def mark_cycle(self) -> None:
        """Notes that the engine takes the next operation."""
        if self._marks_cycles:
            with self._lock:
                self._write(
                    {"name": "CYCLE_START", "ph": "i", "s": "g", "ts": self._now(), "tid": 0}
                )

    def note(
        self, name: str, kind: str, issued_ns: int, begun_ns: int, error: Exception | None
    ) -> None:
        """Writes how long an operation has waited for ranks, and how long it has run since."""
        ended_ns = time.monotonic_ns()
        activity = kind.upper().replace(" ", "_")
        with self._lock:
            lane = self._lane_of(_lane_name(kind, name))
            self._write_span(f"NEGOTIATE_{activity}", lane, issued_ns, begun_ns, "")
            self._write_span(activity, lane, begun_ns, ended_ns, str(error or ""))

    def stop(self) -> None:
        """Completes the file. What is noted later is left out."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._file.write("\n]\n")
                self._file.close()

    def _now(self) -> float:
        return (time.monotonic_ns() - self._began_ns) / 1000

    def _lane_of(self, name: str) -> int:
        if name not in self._lanes:
            lane = self._lanes[name] = len(self._lanes) + 1
            self._write({"name": "thread_name", "ph": "M", "tid": lane, "args": {"name": name}})
            order = {"sort_index": lane}
            self._write({"name": "thread_sort_index", "ph": "M", "tid": lane, "args": order})
        return self._lanes[name]

    def _write_span(self, name: str, lane: int, first_ns: int, last_ns: int, error: str) -> None:
        first_ns = max(first_ns, self._began_ns)
        span = {
            "name": name,
            "ph": "X",
            "tid": lane,
            "ts": (first_ns - self._began_ns) / 1000,
            "dur": max(last_ns - first_ns, 0) / 1000,
        }
        self._write(span | ({"args": {"error": error}} if error else {}))

    def _write(self, event: dict[str, Any]) -> None:
        if not self._is_over:
            self._file.write(("\n" if self._is_first else ",\n") + json.dumps(event | {"pid": 0}))
            self._is_first = False
