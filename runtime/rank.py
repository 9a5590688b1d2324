# SPDX-License-Identifier: Apache-2.0
"""One rank process: one Python thread that turns a loop of messages, link events and model steps.

Order of a turn: what the front says, what the links say, timers and their effects, one step of the model, what
came of it. Idle, it sleeps in poll on the front's socket and the descriptors of links and role until the next deadline.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import zmq

from kvrail.runtime import messages
from kvrail.runtime.engine_protocol import Engine, StepOutput
from kvrail.runtime.errors import ConfigError
from kvrail.runtime.interpreter import begin_serving
from kvrail.runtime.messages import (
    CacheFlushed,
    FlushCache,
    PeerRank,
    Ready,
    Shutdown,
    Stats,
    ToFront,
    ToRank,
)
from kvrail.runtime.process import RankSpec, die_with_parent
from kvrail.runtime.turn_watch import TurnWatch
from kvrail.transfer.errors import TransferError
from kvrail.transfer.link_events import LinkEvent

__all__ = ["Loop", "Role", "main"]

_log = logging.getLogger(__name__)

# Nothing that matters waits for this: it bounds how late timers and heartbeat verdicts may be when idle.
_IDLE_S = 0.1
_STATS_EVERY_S = 0.25
# After a step that took longer, the peers' heartbeats are heard before anything else: they have renewed the tickets
# whose pages are to be pushed now.
_LONG_STEP_S = 0.1


class Role(Protocol):
    """What a rank does with what it hears: completion (CE and single) or prefilling (PE)."""

    engine: Engine

    def handle(self, now: float, message: ToRank) -> None:
        """A message from the front."""

    def on_link(self, now: float, event: LinkEvent) -> None:
        """Something happened on a link."""

    def on_step(self, now: float, outputs: list[StepOutput]) -> None:
        """The model has run one step. Carries out what follows from it, but no timers: they wait for the next tick."""

    def tick(self, now: float) -> None:
        """Timers, and the effects of everything since the last tick."""

    def beat(self, steps: int) -> None:
        """Give every link the heartbeat that says how far this loop and its tickets have got."""

    def stats(self, steps: int) -> Stats:
        """Gauges and counters, as doc/metrics.md names them."""


class Front:
    """This rank's end of the socket to its front."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self.socket = socket
        # What is queued is bounded by the requests that the front admitted; never drop, never block.
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 500)
        self.socket.connect(endpoint)

    def send(self, message: ToFront) -> None:
        """Queue a message for the front."""
        self.socket.send(messages.encode(message), zmq.NOBLOCK)

    def receive(self) -> Iterator[ToRank]:
        """Everything that has arrived."""
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield messages.decode_to_rank(data)
            except msgspec.MsgspecError as error:
                _log.error("a message of the front cannot be read: %s", error)


class Loop:
    """The step loop. One of `wake_fds` is readable when the links have something to say, or the role has."""

    def __init__(
        self,
        front: Front,
        role: Role,
        wake_fds: Sequence[int],
        poll_links: Callable[[float], list[LinkEvent]] | None,
    ) -> None:
        self._front = front
        self._role = role
        self._poll_links = poll_links
        self._poller = zmq.Poller()
        self._poller.register(front.socket, zmq.POLLIN)
        for fd in wake_fds:
            self._poller.register(fd, zmq.POLLIN)
        self._steps = 0
        self._stats_due = 0.0
        self._was_idle = False
        self._watch = TurnWatch()
        self.stopping = False

    def run(self) -> None:
        """Turn until told to stop."""
        while not self.stopping:
            worked = self._turn()
            if not worked and not self.stopping:
                self._poller.poll(int(_IDLE_S * 1000))

    def _turn(self) -> bool:
        role, now, watch = self._role, time.monotonic(), self._watch
        watch.begin()
        for message in self._front.receive():
            if isinstance(message, Shutdown):
                self.stopping = True
                return False
            if isinstance(message, FlushCache):
                pool_pages, host_pages = role.engine.flush_cache()
                # First, so that whoever has the answer finds it in the metrics.
                self._front.send(role.stats(self._steps))
                self._front.send(
                    CacheFlushed(number=message.number, pool_pages=pool_pages, host_pages=host_pages)
                )
                continue
            role.handle(now, message)
        watch.lap("front")
        self._hear_links(now)
        watch.lap("links")
        role.tick(now)
        self._steps += 1
        # Before the step: a ticket that came in just now is renewed while the step runs.
        role.beat(self._steps)
        watch.lap("tickets")
        worked = role.engine.has_work
        if worked:
            outputs = role.engine.step()
            watch.lap("step")
            began, now = now, time.monotonic()
            if now - began > _LONG_STEP_S:
                self._hear_links(now)
            role.on_step(now, outputs)
        # At once when work ends, so that whoever waits for "nothing held" sees it soon; else a few times a second.
        if now >= self._stats_due or (self._was_idle is False and not worked):
            self._front.send(role.stats(self._steps))
            self._stats_due = now + _STATS_EVERY_S
        watch.lap("outputs")
        watch.end()
        self._was_idle = not worked
        return worked

    def _hear_links(self, now: float) -> None:
        if self._poll_links is not None:
            for event in self._poll_links(now):
                self._role.on_link(now, event)


def main() -> None:
    """Entry point: the spec comes on stdin."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    die_with_parent(spec.parent)
    # Ctrl-C reaches the whole foreground group; the front tells us when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(
        level=spec.config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {spec.config.role} rank {spec.rank} %(name)s: %(message)s",
    )
    status = 0
    # Leaving the context sends what is queued (LINGER) and closes it.
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.PAIR) as socket:
        try:
            _serve(spec, Front(socket, spec.endpoint))
        except (ConfigError, TransferError) as error:
            # For whoever wrote the flags: what is wrong, and not where in the code that was found.
            _log.error("%s", error)
            _log.debug("raised here", exc_info=True)
            status = 2
    # All that matters is closed, in order. What is left is the interpreter taking torch apart, object by object:
    # seconds of a busy core, while whoever stopped this role waits.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


def _serve(spec: RankSpec, front: Front) -> None:
    # Imported here: they bring torch and UCX, and a wrong spec should fail before that.
    from transformers.utils.logging import disable_progress_bar

    from kvrail.runtime.build import build_rank

    # Several ranks write to one terminal, or into one log: the front says how far they are.
    disable_progress_bar()

    incarnation = secrets.token_bytes(16)
    with build_rank(spec, incarnation, front.send) as rank:
        loop = Loop(front, rank.role, rank.wake_fds, rank.poll_links)

        def stop(*_: object) -> None:
            loop.stopping = True

        signal.signal(signal.SIGTERM, stop)
        begin_serving()
        front.send(
            Ready(
                self_rank=PeerRank(
                    incarnation=incarnation,
                    rank=spec.rank,
                    host=rank.address.host,
                    port=rank.address.port,
                    unix_path=rank.address.unix_path,
                ),
                layout=rank.role.engine.layout,
                pages=rank.pages,
                max_model_len=rank.role.engine.max_model_len,
                pool_memory=rank.pool_memory,
                queue_limit=rank.queue_limit,
            )
        )
        loop.run()


if __name__ == "__main__":
    main()
