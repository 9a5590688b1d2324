# SPDX-License-Identifier: Apache-2.0
"""The device that an engine computes on, and what is queued on it that nobody has waited for.

On a GPU a call returns before its work is done. Whoever gives pages back must first know that nothing queued still
touches them: another process may write into a free page, and that write is not in the order of our stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kvrail.runtime.errors import ConfigError

__all__ = ["Compute", "device_name", "open_device", "out_of_memory"]


class Compute:
    """The stream of one engine. On a CPU everything is done when a call returns, and all of this is free."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A stream of its own: the default one waits for streams of other libraries, and makes them wait.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._issued = self._done = 0
        self._paced: torch.cuda.Event | None = None

    @property
    def stream(self) -> int | None:
        """The address of the CUDA stream, or None on a CPU."""
        return None if self._stream is None else int(self._stream.cuda_stream)

    @contextlib.contextmanager
    def queue(self) -> Iterator[int]:
        """Work inside goes to the stream, and may still be running when this ends. Gives its number, for `settle`."""
        self._issued += 1
        if self._stream is None:
            self._done = self._issued
            yield self._issued
            return
        with torch.cuda.stream(self._stream):
            yield self._issued

    def pace(self) -> None:
        """To be called behind each step's work: the host may be one step ahead, and waits here to be no more.

        What it decides far ahead it would decide without knowing who comes or leaves meanwhile.
        """
        if self._stream is not None:
            before, self._paced = self._paced, self._stream.record_event()
            if before is not None:
                before.synchronize()

    def waited(self) -> None:
        """A result of the last thing queued has arrived: everything before it is done, too."""
        self._done = self._issued

    def settle(self, number: int | None = None) -> None:
        """Return when the work with this number (without one: all of it) is done."""
        if self._done < (self._issued if number is None else number):
            self._wait()
            self._done = self._issued

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def open_device(name: str) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:N"), as the process's current one.

    Raises ConfigError when it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: must be cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"--device {name}: must be cpu, cuda or cuda:N")
    if torch.version.cuda is None:
        raise ConfigError(f"--device {name}: torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch finds no usable CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
    # Events, pinned memory and compiled kernels belong to the current device, whatever device their tensors lie on: an
    # event first recorded on GPU 0 is refused by a stream of GPU 1, and pinning makes a context on GPU 0.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """What a person would call it."""
    return "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def out_of_memory(device: torch.device, doing: str, remedy: str) -> str:
    """What to tell about a CUDA out-of-memory: how much is left, and which settings ask for less."""
    free, total = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_allocated(device)
    return (
        f"{device} ran out of memory while {doing}: {free >> 20} of {total >> 20} MiB are free, the model and its "
        f"work hold {mine >> 20} MiB; {remedy}"
    )
