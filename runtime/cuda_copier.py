# SPDX-License-Identifier: Apache-2.0
"""Copies between pages in GPU memory and a pinned host cache, in the order of streams: no step ever waits for one.

    engine's stream   ──chunk──┬───────────chunk──────▶ ─┬─reads what was loaded─▶
    saves (low priority)       └─▶ out to the host       │
    loads (high priority)  in from the host ─────────────┘

A save comes behind the work that was queued when it was asked for. A load comes behind nothing: what it writes was
given out by the PagePool, so nothing that is queued touches it. Work that is to find what was loaded is held on the
engine's stream until the copy is over.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrail.transfer.errors import CudaFailed

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["CudaCopier"]

_Addresses = npt.NDArray[np.uint64]
_LOOK_S = 50e-6


class _CudaCopy:
    """A copy on one of our streams. Usable as soon as it is queued."""

    usable = True

    def __init__(self, native: _ucx.HostCopy, device: _ucx.CudaDevice, stream: int) -> None:
        self._native = native
        self._device = device
        self._stream = stream
        self._ended = self._held = False
        self.error = ""
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        if not self._ended:
            try:
                if not self._native.done():
                    return False
                self.seconds = self._native.seconds()
            except CudaFailed as failed:
                self.error = str(failed)
            self._ended = True
        return True

    def precede(self) -> None:
        if not self._held and not self.done:
            self._device.hold(self._stream, self._native.fence)
        self._held = True

    def wait(self, timeout_s: float) -> None:
        # The driver's own wait has no timeout.
        end = time.monotonic() + timeout_s
        while not self.done and time.monotonic() < end:
            time.sleep(_LOOK_S)


class CudaCopier:
    """Implements PageCopier for an engine that computes on `stream` (an address) of `device`.

    `state_bytes`: GPU memory of so many bytes is taken for `snapshot`; 0: it is never called. Raises CudaFailed when
    the GPU cannot give what the copies need.
    """

    in_stream_order = True

    def __init__(self, device: _ucx.CudaDevice, stream: int, *, state_bytes: int = 0) -> None:
        # On first use: the native module must have been loaded with the right UCX before.
        from kvrail.transfer import _ucx

        self._device = device
        self._stream = stream
        self._loads = _ucx.HostCopies(device, to_host=False)
        self._saves = _ucx.HostCopies(device, to_host=True)
        self._staging = device.allocate(state_bytes) if state_bytes else None
        self._staged: _CudaCopy | None = None
        # Behind the last state that was read from its slot.
        self._taken: _ucx.CudaFence | None = None

    def save(self, source: _Addresses, target: _Addresses, nbytes: int) -> _CudaCopy:
        """See PageCopier."""
        after = self._device.record(self._stream)
        return self._copy(self._saves.copy(source, target, nbytes, after=after))

    def snapshot(self, source: _Addresses, target: _Addresses, nbytes: int) -> _CudaCopy:
        """See PageCopier. The engine's next work waits for a copy within the GPU only."""
        assert self._staging is not None
        if self._staged is not None:
            # What was taken last time may still be on its way out.
            self._staged.precede()
        for one, there in zip(source.tolist(), target, strict=True):
            self._device.copy(one, self._staging.address, nbytes, self._stream)
            self._taken = self._device.record(self._stream)
            staged = np.array([self._staging.address], dtype=np.uint64)
            self._staged = self.save(staged, np.array([there], dtype=np.uint64), nbytes)
        assert self._staged is not None
        return self._staged

    def load(self, source: _Addresses, target: _Addresses, nbytes: int) -> _CudaCopy:
        """See PageCopier."""
        # A state slot may change hands while what reads it for a snapshot is still queued.
        return self._copy(self._loads.copy(source, target, nbytes, after=self._taken))

    def behind_loads(self) -> _ucx.CudaFence:
        """See PageCopier."""
        return self._loads.record()

    def close(self) -> None:
        """Finish what was asked for."""
        for stream in (self._loads, self._saves):
            # A failure is told where its copy was looked at; on a GPU that has failed nothing runs any more.
            with contextlib.suppress(CudaFailed):
                stream.wait()
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _copy(self, native: _ucx.HostCopy) -> _CudaCopy:
        return _CudaCopy(native, self._device, self._stream)
