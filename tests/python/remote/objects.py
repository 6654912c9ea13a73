"""Objects that the tests have at other ranks, and what these do with them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

from trireme import remote

from harness.meeting import until
from remote.functions import FREED_S

ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()
kept: dict[str, Any] = {}


class Counter(remote.Object):
    def __init__(self, value: int = 0, *, step: int = 1) -> None:
        if value < 0:
            raise ValueError(f"a counter of {value}")
        self.value, self.step = value, step
        self.lock = threading.Lock()
        ALIVE.add(self)

    @remote.method
    def add(self, count: int = 1) -> int:
        with self.lock:
            self.value += count * self.step
            return self.value

    @remote.method
    def get(self) -> int:
        return self.value

    @remote.method
    def myself(self) -> remote.Ref:
        return remote.here(self)

    @remote.method
    def fail(self, text: str) -> None:
        raise LookupError(text)

    @remote.method
    def is_me(self, ref: remote.Ref) -> bool:
        return ref.local_value() is self

    def secret(self) -> int:
        return self.value


class Louder(Counter):
    @remote.method
    def get(self) -> str:
        return f"{self.value}!"

    @remote.method
    def shout(self, times: int) -> str:
        return "!" * times


class Box(remote.Object):
    def __init__(self, content: Any = None) -> None:
        self.content = content
        ALIVE.add(self)

    @remote.method
    def put(self, content: Any) -> None:
        self.content = content

    @remote.method
    def take(self) -> Any:
        content, self.content = self.content, None
        return content

    @remote.method
    def use(self) -> int:
        return self.content.add(1)


class Silent(remote.Object):
    @remote.method
    def call(self) -> str:
        return "called"


@remote.function
def count_alive() -> int:
    gc.collect()
    return len(ALIVE)


@remote.function
def use(ref: remote.Ref) -> list[Any]:
    return [ref.add(10), ref]


@remote.function
def use_all(refs: dict[str, Any]) -> Any:
    return refs["one"][0].add(1) + refs["two"][1].add(1), refs


@remote.function
def keep(name: str, value: Any) -> None:
    kept[name] = value


@remote.function
def use_kept(name: str) -> int:
    return kept[name].add(1)


@remote.function
def drop(name: str) -> None:
    del kept[name]


@remote.function
def kept_here(name: str, value: int) -> remote.Ref:
    kept[name] = Counter(value)
    return remote.here(kept[name])


@remote.function
def value_of_kept(name: str) -> int:
    return kept[name].value


def until_alive(at: str, count: int) -> None:
    until(lambda: remote.call(at, count_alive) == count, FREED_S)
