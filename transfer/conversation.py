# SPDX-License-Identifier: Apache-2.0
"""Drives one handshake over one non-blocking stream, with a deadline, whenever the loop says that something moved."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Generic, TypeVar

from kvrail.transfer.control_socket import ControlStream, Frame
from kvrail.transfer.errors import LinkLost, LinkRefused, TransferError
from kvrail.transfer.handshake import Refused, Turn

__all__ = ["Conversation"]

_R = TypeVar("_R")


class Conversation(Generic[_R]):
    """One handshake in progress. `advance` returns the generator's result once it is done and all is sent.

    A result that is itself a Turn is sent before. Raises LinkRefused (either side said no) or LinkLost (the stream
    broke, or the deadline passed); the stream is then closed. On success the stream is the caller's.
    """

    def __init__(
        self, stream: ControlStream, generator: Generator[Turn | None, Frame, _R], deadline: float
    ) -> None:
        self.stream = stream
        self.deadline = deadline
        # Whether the peer has said anything yet.
        self.heard = False
        self._generator = generator
        self._started = False
        self._done = False
        self._result: _R | None = None

    def advance(self, now: float) -> _R | None:
        """Do what can be done now."""
        try:
            self.stream.flush()
            if not self._started:
                self._started = True
                self._step(None)
            while not self._done and not self.stream.wants_write:
                frame = self.stream.receive()
                if frame is None:
                    break
                self.heard = True
                self._step(frame)
            if self._done and not self.stream.wants_write:
                return self._result
            # Only now: what the peer said while this side was busy with one long step is not late.
            if now > self.deadline:
                raise LinkRefused("the handshake took too long")
            return None
        except OSError as error:
            # This machine's fault (no file descriptors, say), and nobody else's.
            self.close()
            raise LinkLost(f"the handshake failed: {error}") from error
        except TransferError as error:
            if isinstance(error, Refused):
                # Best effort: the peer gets the reason if its socket takes it at once.
                with contextlib.suppress(TransferError, AssertionError):
                    self.stream.send(error.payload)
            self.close()
            raise

    def _step(self, frame: Frame | None) -> None:
        try:
            turn = next(self._generator) if frame is None else self._generator.send(frame)
        except StopIteration as end:
            self._done, self._result = True, end.value
            turn = end.value if isinstance(end.value, Turn) else None
        if turn is not None:
            self.stream.limit = turn.limit
            self.stream.send(turn.payload, turn.fds)

    def close(self) -> None:
        """Give up."""
        self._generator.close()
        self.stream.close()
