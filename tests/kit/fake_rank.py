# SPDX-License-Identifier: Apache-2.0
"""A rank without an engine: speaks the real messages over the real socket, and does what a test tells it to."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import zmq

from kvrail.runtime.messages import (
    LinkReport,
    Output,
    Outputs,
    PeerRank,
    Ready,
    Shutdown,
    Submit,
    ToFront,
    ToRank,
    decode_to_rank,
    encode,
)
from kvrail.transfer.layout import PageLayout
from kvrail.transfer.wire import TokenLogprob, pack_u32

__all__ = ["FakeRank", "answers", "output"]

Message = TypeVar("Message")
LAYOUT = PageLayout(model_id="tiny", layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16)


def output(
    request_id: str,
    tokens: Iterable[int],
    finish: str | None = None,
    *,
    route: str = "local",
    cached: int = 0,
    logprobs: list[TokenLogprob] | None = None,
) -> Outputs:
    """One step's output for one request."""
    item = Output(request_id, pack_u32(list(tokens)), finish, route, cached, logprobs or [])  # type: ignore[arg-type]
    return Outputs(items=[item])


class FakeRank:
    """A rank on a thread of its own. `behave` maps each message from the front to the messages to answer with.

    `received` holds all messages from the front, in order.
    """

    def __init__(
        self,
        endpoint: str,
        behave: Callable[[FakeRank, ToRank], Iterable[ToFront]] = lambda rank, message: (),
        *,
        rank: int = 0,
        queue_limit: int = 8,
        max_model_len: int = 256,
        say_ready: bool = True,
    ) -> None:
        self.endpoint = endpoint
        self.behave = behave
        self.rank = rank
        self.incarnation = secrets.token_bytes(16)
        self.received: list[ToRank] = []
        self.ready = Ready(
            self_rank=PeerRank(incarnation=self.incarnation, rank=rank, host="127.0.0.1", port=1),
            layout=LAYOUT,
            pages=64,
            max_model_len=max_model_len,
            pool_memory="4 KiB pages",
            queue_limit=queue_limit,
        )
        self._say_ready = say_ready
        self._outbox: queue.SimpleQueue[ToFront] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, *messages: ToFront) -> None:
        """Say this to the front, soon."""
        for message in messages:
            self._outbox.put(message)

    def link(self, peer: FakeRank, state: str = "up", reason: str = "") -> None:
        """Report a link to a rank of a prefill engine."""
        report = LinkReport(
            incarnation=peer.incarnation,
            rank=peer.rank,
            state=state,  # type: ignore[arg-type]
            lane="shm" if state == "up" else "",
            transport="memfd" if state == "up" else "",
            memory="4 KiB pages",
            reason=reason,
            probes=[(65536, 5.0, 13.0, 1, "shm")],
        )
        self.send(report)

    def wait_for(self, kind: type[Message], count: int = 1, timeout_s: float = 15.0) -> list[Message]:
        """The messages of this kind, once there are `count`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(found := [m for m in self.received if isinstance(m, kind)]) < count:
                left = deadline - time.monotonic()
                assert left > 0, f"no {count} {kind.__name__} came; got {self.received}"
                assert self._error is None, self._error
                self._changed.wait(left)
        return found

    def stop(self) -> None:
        """End as a process would: the socket closes."""
        self._stopped.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PAIR)
        socket.set(zmq.LINGER, 500)
        try:
            socket.connect(self.endpoint)
            if self._say_ready:
                socket.send(encode(self.ready))
            while not self._stopped.is_set():
                while not self._outbox.empty():
                    socket.send(encode(self._outbox.get()))
                if not socket.poll(5):
                    continue
                message = decode_to_rank(socket.recv())
                with self._changed:
                    self.received.append(message)
                    self._changed.notify_all()
                if isinstance(message, Shutdown):
                    return
                for answer in self.behave(self, message):
                    socket.send(encode(answer))
        except BaseException as error:
            self._error = error
            with self._changed:
                self._changed.notify_all()
        finally:
            socket.close()
            context.term()


def answers(*steps: Iterable[int], finish: str = "length") -> Callable[[FakeRank, ToRank], Iterable[ToFront]]:
    """A behaviour: each request is answered with these tokens, one output a step, all at once."""

    def behave(rank: FakeRank, message: ToRank) -> Iterable[ToFront]:
        if not isinstance(message, Submit):
            return
        for place, step in enumerate(steps):
            yield output(message.request_id, step, finish if place == len(steps) - 1 else None)

    return behave
