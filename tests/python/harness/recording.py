"""A communicator that notes what goes over it: tests/cpp/recording_communicator.h."""

from __future__ import annotations

from typing import Any

from trireme import _C

from harness.cpp_modules import load, needs

needs_recording = needs("_recording")


def recording(inner: _C.Communicator) -> Any:
    """Its ``records`` have verb, label, bytes and dtypes; ``clear()`` forgets them."""
    return load("_recording").RecordingCommunicator(inner)
