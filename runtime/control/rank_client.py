# SPDX-License-Identifier: Apache-2.0
"""The front's end of one rank process: a ZeroMQ PAIR socket, and many requests told apart by their ids.

The front binds and the rank connects, so a restarted rank finds its front again. Nothing here blocks: a message is
handed to ZeroMQ at once or the rank counts as gone. A rank that is gone (its socket closed) or that says nothing
while requests wait for it fails those requests; its next `Ready` makes it usable again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvrail.runtime.errors import Unavailable
from kvrail.runtime.link_board import forget_ended
from kvrail.runtime.messages import (
    Abort,
    Accepted,
    CacheFlushed,
    Connect,
    Deferred,
    Disconnect,
    Failed,
    FlushCache,
    Granted,
    LinkDropped,
    LinkReport,
    Move,
    Output,
    Outputs,
    PeerRank,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Ready,
    Shutdown,
    Stats,
    Stranded,
    Submit,
    ToFront,
    ToRank,
    decode_to_front,
    encode,
)

__all__ = ["GenerateEvent", "PrefillEvent", "RankClient", "RankRequest", "Steering"]

# What a rank says of the way to a first token: heard at once, however slowly the client reads.
Steering = Granted | Deferred | Stranded
GenerateEvent = Output | Failed
PrefillEvent = Accepted | PrefillDone
Event = TypeVar("Event", GenerateEvent, PrefillEvent)

_log = logging.getLogger(__name__)
# What was sent just before the rank closed its socket may still be in ours; it is read within this time.
_DRAIN_S = 0.05


class RankRequest(Generic[Event]):
    """The events of one request at a rank, in order; iteration ends after the last one.

    A context manager: leaving it before the last event aborts the request at the rank. `on_end` is called when the
    rank is done with it, which may be long before its events have been read. A request for several answers
    (`choices`) has ended when each of them has. `called`: the id of the ticket that the rank expects a prefill engine
    to be called with at once, ahead of the grant; or b"".
    """

    def __init__(
        self, client: RankClient, request_id: str, failure: Callable[[str], Event], choices: int = 1
    ) -> None:
        self.request_id = request_id
        self._open = set(range(choices))
        self.ended = False
        self.called = b""
        self.on_end: Callable[[], None] = lambda: None
        self.on_steering: Callable[[Steering], None] = lambda event: None
        self._client = client
        self._failure: Callable[[str], Event] = failure
        # None: no further events (it wakes who waits for one).
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def __aiter__(self) -> RankRequest[Event]:
        return self

    async def __anext__(self) -> Event:
        if self.ended and self._events.empty():
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None:
            raise StopAsyncIteration
        return event

    def __enter__(self) -> RankRequest[Event]:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort("the front gave the request up")

    def abort(self, reason: str) -> None:
        """Tell the rank to drop the request, unless it has ended. No further events come."""
        if not self.ended:
            self._end(None)
            self._client.post(Abort(request_id=self.request_id, reason=reason))

    def abort_choice(self, choice: int, reason: str) -> None:
        """Tell the rank to drop one choice, unless it has ended; the last one aborts the request."""
        if self.ended or choice not in self._open:
            return
        self._open.discard(choice)
        if not self._open:
            self.abort(reason)
        else:
            self._client.post(Abort(request_id=self.request_id, reason=reason, choice=choice))

    def fail(self, reason: str) -> None:
        """End the request from this side with a failure event; the rank is told to drop it."""
        if not self.ended:
            self._end(self._failure(reason))
            self._client.post(Abort(request_id=self.request_id, reason=reason))

    def _heard(self, event: Event) -> None:
        if isinstance(event, Output):
            if event.choice not in self._open:
                return
            if event.finish_reason is not None:
                self._open.discard(event.choice)
        if isinstance(event, Failed | PrefillDone) or not self._open:
            self._end(event)
        else:
            self._events.put_nowait(event)

    def _end(self, last: Event | None) -> None:
        self.ended = True
        self._client._forget(self.request_id)
        self._events.put_nowait(last)
        self.on_end()


class RankClient:
    """One rank process, seen from its front. All methods belong to the event loop that called `start`.

    `silent_limit_s`: a rank with requests that says nothing for so long is taken as stuck.
    """

    def __init__(self, rank: int, endpoint: str, *, silent_limit_s: float = 60.0) -> None:
        self.rank = rank
        self.endpoint = endpoint
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.links: dict[tuple[bytes, int], LinkReport] = {}
        self.trouble = "its process is starting"
        self.stuck = False
        self._silent_limit_s = silent_limit_s
        self._may_end = False
        self._listeners: list[Callable[[], None]] = []
        self._generating: dict[str, RankRequest[GenerateEvent]] = {}
        self._prefilling: dict[str, RankRequest[PrefillEvent]] = {}
        self._flushing: dict[int, asyncio.Future[CacheFlushed]] = {}
        self._flushes = 0
        # What the rank has given us to call ahead of a grant with, once.
        self._next_ticket = b""
        self._heard_at = 0.0
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._was_ready = asyncio.Event()

    async def start(self, context: zmq.asyncio.Context) -> None:
        """Bind the socket and begin to listen. The rank may connect before or after."""
        self._socket = context.socket(zmq.PAIR)
        # Unlimited: what the front sends is bounded by its admission, what a rank sends by its requests.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 200)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(self.endpoint)
        self._tasks = [
            asyncio.create_task(self._listen(self._socket)),
            asyncio.create_task(self._watch_connection(self._monitor)),
            asyncio.create_task(self._watch_silence()),
        ]

    async def close(self) -> None:
        """Fail what is open and close the socket. Does not stop the rank: see `shutdown`."""
        self.ready, self.trouble = None, "the front is stopping"
        self.fail_all("the front is stopping")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None and self._monitor is not None:
            # In this order: ZeroMQ blocks for ever when it reports an event and nobody holds the other end.
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._socket = self._monitor = None

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the rank becomes ready, is lost, or reports a link."""
        self._listeners.append(listener)

    async def wait_ready(self, timeout_s: float) -> Ready:
        """The rank's `Ready`; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._was_ready.wait()
        assert self.ready is not None
        return self.ready

    @property
    def usable(self) -> bool:
        """Whether new requests may go here: ready, and not silent over its requests."""
        return self.ready is not None and not self.stuck

    @property
    def outstanding(self) -> int:
        """Requests that the rank has and that have not ended."""
        return len(self._generating) + len(self._prefilling)

    def submit(self, message: Submit) -> RankRequest[GenerateEvent]:
        """Serve a request. Raises Unavailable when the rank is not ready or gone."""
        if message.peer is not None and self._next_ticket:
            message = msgspec.structs.replace(message, called=(self._next_ticket, time.monotonic()))

        def failure(reason: str) -> GenerateEvent:
            return Failed(request_id=message.request_id, status=503, reason=reason, retry_after_s=1.0)

        request = RankRequest[GenerateEvent](self, message.request_id, failure, message.sampling.n)
        self._open(message, request, self._generating)
        if message.called is not None:
            request.called, self._next_ticket = self._next_ticket, b""
        return request

    def prefill(self, message: Prefill) -> RankRequest[PrefillEvent]:
        """Prefill for a ticket. Raises Unavailable when the rank is not ready or gone."""

        def failure(reason: str) -> PrefillEvent:
            return PrefillDone(request_id=message.request_id, ok=False, reason=reason, status=503)

        request = RankRequest[PrefillEvent](self, message.request_id, failure)
        self._open(message, request, self._prefilling)
        return request

    def prefill_failed(self, request_id: str, ticket: bytes, reason: str) -> None:
        """The call to the prefill engine did not succeed."""
        self.post(PrefillFailed(request_id=request_id, ticket=ticket, reason=reason))

    def move(self, request_id: str, peer: tuple[bytes, int] | None) -> None:
        """The answer to `Stranded`."""
        self.post(Move(request_id=request_id, peer=peer))

    def connect(self, peer: PeerRank) -> None:
        """Keep a link to this prefill rank."""
        self.post(Connect(peer=peer))

    def disconnect(self, incarnation: bytes, rank: int, reason: str) -> None:
        """Drop the link to this prefill rank and forget its reports."""
        self.links.pop((incarnation, rank), None)
        self.post(Disconnect(incarnation=incarnation, rank=rank, reason=reason))

    async def flush_cache(self, timeout_s: float = 60.0) -> CacheFlushed:
        """Let the rank forget cached prefixes. Raises Unavailable when it is not ready, goes, or does not answer."""
        if self.ready is None:
            raise Unavailable(f"rank {self.rank} is not ready: {self.trouble}", retry_after_s=1.0)
        self._flushes += 1
        number = self._flushes
        answer: asyncio.Future[CacheFlushed] = asyncio.get_running_loop().create_future()
        self._flushing[number] = answer
        try:
            if not self.post(FlushCache(number=number)):
                raise Unavailable(f"rank {self.rank} cannot be reached", retry_after_s=1.0)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(
                f"rank {self.rank} did not flush in {timeout_s:g} s", retry_after_s=1.0
            ) from None
        finally:
            del self._flushing[number]

    def expect_end(self) -> None:
        """The role is stopping: that the rank ends is no trouble any more."""
        self._may_end = True

    def shutdown(self) -> None:
        """Ask the rank to stop in good order."""
        self.post(Shutdown())

    def post(self, message: ToRank) -> bool:
        """Hand a message to ZeroMQ. False: no rank is connected (its requests are failed elsewhere)."""
        if self._socket is None:
            return False
        # NOBLOCK: pyzmq tries at once and the future is done when it returns.
        sent = cast("asyncio.Future[Any]", self._socket.send(encode(message), zmq.NOBLOCK))
        return sent.done() and sent.exception() is None

    def _open(
        self, message: Submit | Prefill, request: RankRequest[Event], table: dict[str, RankRequest[Event]]
    ) -> None:
        if self.ready is None:
            raise Unavailable(f"rank {self.rank} is not ready: {self.trouble}", retry_after_s=1.0)
        if message.request_id in self._generating or message.request_id in self._prefilling:
            raise ValueError(f"request {message.request_id} is already at rank {self.rank}")
        if not self.post(message):
            raise Unavailable(f"rank {self.rank} cannot be reached", retry_after_s=1.0)
        if not self.outstanding:
            self._heard_at = time.monotonic()
        table[message.request_id] = request

    def _forget(self, request_id: str) -> None:
        self._generating.pop(request_id, None)
        self._prefilling.pop(request_id, None)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            self._heard_at = time.monotonic()
            if self.stuck:
                _log.warning("rank %d speaks again", self.rank)
                self.stuck = False
                self._tell()
            try:
                self._dispatch(decode_to_front(data))
            except msgspec.MsgspecError as error:
                _log.error("rank %d sent a message that cannot be read: %s", self.rank, error)
            except Exception:
                # What one message stumbles over must not make this front deaf for good.
                _log.exception("a message of rank %d could not be worked on", self.rank)

    def _dispatch(self, message: ToFront) -> None:
        match message:
            case Outputs():
                for output in message.items:
                    if generating := self._generating.get(output.request_id):
                        generating._heard(output)
            case Granted() | Deferred() | Stranded():
                if isinstance(message, Granted) and message.next_ticket:
                    self._next_ticket = message.next_ticket
                if generating := self._generating.get(message.request_id):
                    generating.on_steering(message)
            case Failed():
                if generating := self._generating.get(message.request_id):
                    generating._heard(message)
            case Accepted() | PrefillDone():
                if prefilling := self._prefilling.get(message.request_id):
                    prefilling._heard(message)
            case CacheFlushed():
                if (flushing := self._flushing.get(message.number)) and not flushing.done():
                    flushing.set_result(message)
            case Stats():
                self.stats = message
            case LinkReport():
                forget_ended(self.links, (message.incarnation, message.rank), message)
                self._tell()
            case LinkDropped():
                # A report may have crossed our Disconnect.
                self.links.pop((message.incarnation, message.rank), None)
                self._tell()
            case Ready():
                if self.ready is not None:
                    self._lost("it was started anew")
                _log.info(
                    "rank %d is ready: %d pages in %s memory, longest context %d tokens",
                    self.rank,
                    message.pages,
                    message.pool_memory,
                    message.max_model_len,
                )
                self.ready, self.trouble = message, ""
                self._was_ready.set()
                self._tell()

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await recv_monitor_message(monitor)
            gone = self.ready
            await asyncio.sleep(_DRAIN_S)
            # A rank that was restarted within the drain time has said Ready already, and keeps its requests.
            if self.ready is gone:
                self._lost("its process ended")

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._silent_limit_s / 4))
            silent_s = time.monotonic() - self._heard_at
            if self.outstanding and silent_s > self._silent_limit_s:
                _log.error("rank %d has said nothing for %.0f s", self.rank, silent_s)
                self.stuck = True
                self.fail_all(f"rank {self.rank} has said nothing for {silent_s:.0f} s")

    def _lost(self, reason: str) -> None:
        if self.ready is not None:
            level = logging.INFO if self._may_end else logging.WARNING
            _log.log(level, "rank %d is gone: %s", self.rank, reason)
        self.ready, self.stats, self.trouble, self.stuck = None, None, reason, False
        self._next_ticket = b""
        self._was_ready.clear()
        self.links.clear()
        self.fail_all(f"rank {self.rank} is gone: {reason}")
        self._tell()

    def fail_all(self, reason: str) -> None:
        """End every open request with a failure."""
        for generating in list(self._generating.values()):
            generating.fail(reason)
        for prefilling in list(self._prefilling.values()):
            prefilling.fail(reason)
        for flushing in self._flushing.values():
            if not flushing.done():
                flushing.set_exception(Unavailable(reason, retry_after_s=1.0))

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
