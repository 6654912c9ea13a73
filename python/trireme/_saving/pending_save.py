"""A save that may still be going on."""

from __future__ import annotations

from trireme._C import PendingSave as CorePendingSave
from trireme._core.errors import Area


class PendingSave:
    """What ``save_checkpoint`` returns. Dropping it cancels nothing."""

    def __init__(self, core: CorePendingSave) -> None:
        self._core = core

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the checkpoint is on the disk and has taken its place.

        Args:
            timeout: in seconds; by default it waits as long as the save takes.

        Raises:
            TimeoutError: time is over; the save goes on.
            ValueError, TypeError, RuntimeError, torch.distributed.DistBackendError: what
                ``save_checkpoint`` raises, on all ranks; the checkpoint before is still there.
        """
        if not self._core.wait_for(timeout):
            got = f"got a save to '{self.path}' that is not done after {timeout} s"
            Area("saving").refuse(got, "It goes on: wait again.", kind=TimeoutError)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._core.done()

    @property
    def stall_ms(self) -> float:
        """How long threads of this rank have been held so far, by the call and by writers."""
        return self._core.stall_ms

    @property
    def written_bytes(self) -> int:
        """The bytes of tensors that this rank has written; 0 before the end."""
        return self._core.written_bytes

    @property
    def path(self) -> str:
        return self._core.path

    def __repr__(self) -> str:
        return f"PendingSave({self.path!r}, done={self.done()}, stall_ms={self.stall_ms:.3f})"
