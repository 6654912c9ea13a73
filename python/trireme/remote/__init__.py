"""Typed calls between the ranks of a group, objects and modules that live elsewhere.

    @remote.function
    def add(a, b):
        return a + b

    remote.start("ps0" if rank == 0 else f"trainer{rank}")
    total = remote.call("ps0", add, torch.ones(2), torch.ones(2))
    remote.stop()

Nothing is pickled: only what both sides have registered can be called, with values of a few kinds.
"""

from trireme.remote.endpoint import names, start, stop
from trireme.remote.functions import Pending, call, call_async, function
from trireme.remote.module import Module, RemoteParameter
from trireme.remote.objects import Object, Ref, RemoteMethod, create, here, method

__all__ = [
    "Module",
    "Object",
    "Pending",
    "Ref",
    "RemoteMethod",
    "RemoteParameter",
    "call",
    "call_async",
    "create",
    "function",
    "here",
    "method",
    "names",
    "start",
    "stop",
]

# Users import them from here, and so they are printed.
for _one in (Module, Object, Pending, Ref, RemoteMethod, RemoteParameter):
    _one.__module__ = __name__
