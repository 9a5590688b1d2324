# SPDX-License-Identifier: Apache-2.0
"""The thread in a vLLM worker that owns links and ledger: asleep until a link, a step or a timer has something for it.

vLLM's steps only put facts into its queue and take results out, so they never wait for it, nor does it for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvrail.runtime.vllm.front_files import PeersFile, StatusFile
from kvrail.runtime.vllm.given_blocks import GivenBlocks
from kvrail.runtime.vllm.kv_tensors import Geometry
from kvrail.runtime.vllm.landing import Landing
from kvrail.runtime.vllm.layer_parts import Parts
from kvrail.runtime.vllm.meta import LayerDone, StepFacts
from kvrail.runtime.vllm.pushing import Pushing
from kvrail.runtime.vllm.results import Results
from kvrail.runtime.vllm.settings import Settings
from kvrail.transfer.errors import TransferError
from kvrail.transfer.foreign_pool import ForeignPool, ForeignPools
from kvrail.transfer.gpu import Gpu
from kvrail.transfer.layout import BlockLayout
from kvrail.transfer.link_events import LinkKey, LinkOptions
from kvrail.transfer.links import Links
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.sender import Sender
from kvrail.transfer.ucx import open_context, open_reactor

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["Memory", "Service"]

_log = logging.getLogger(__name__)
_MOST_TICKETS = 4096
_ANSWER_S = 10.0
_T = TypeVar("_T")
# At least so often a turn, for what has no descriptor to wake it: missed heartbeats, dialing again.
_TURN_S = 0.05


class Memory(NamedTuple):
    """The KV tensors of a worker: what they hold, where, and what keeps them alive. `cuda`: in that GPU's memory.

    `groups`: names of the layers of each KV cache group.
    """

    layout: BlockLayout
    geometry: Geometry
    groups: Sequence[Sequence[str]]
    owner: object
    cuda: _ucx.CudaDevice | None = None
    gpu: Gpu | None = None


class _Posted(NamedTuple):
    facts: StepFacts | LayerDone
    after: _ucx.CudaFence | None


class _Question(NamedTuple):
    """Something that the service's thread is to do, and who waits for it."""

    work: Callable[[float], None]
    done: threading.Event


class Service:
    """One a worker; the thread runs from the constructor to `close`.

    `token`: the cluster token. `rank`: tensor-parallel rank, which the peer has as well; `offset` is added to ports.
    `by_request`: see Landing.
    Raises TransferError when UCX cannot use the memory or the port is taken.
    """

    def __init__(
        self,
        settings: Settings,
        memory: Memory,
        *,
        token: bytes,
        rank: int,
        offset: int,
        ucx_overrides: dict[str, str],
        by_request: bool = True,
    ) -> None:
        self.results = Results()
        self.identity = LinkKey(os.urandom(16), rank)
        self.cuda = memory.cuda
        self._settings = settings
        with contextlib.ExitStack() as stack:
            context = open_context(
                settings.put_transport,
                settings.kv_host,
                library=settings.ucx,
                overrides=ucx_overrides,
                cuda=memory.cuda is not None,
            )
            stack.callback(context.close)
            reactor = open_reactor(context, spin_us=0, copy_threads=1, cuda=memory.cuda)
            stack.callback(reactor.close)
            self._reactor = reactor
            geometry = memory.geometry
            ranges = [
                ForeignPool(
                    context,
                    address=part.address,
                    units=part.tensors * geometry.blocks,
                    unit_bytes=geometry.unit_bytes,
                    owner=memory.owner,
                    cuda=memory.cuda,
                )
                for part in geometry.ranges
            ]
            self._pools = ForeignPools.over(context, ranges, memory.cuda)
            self._links = Links(
                reactor=reactor,
                identity=self.identity,
                token=token,
                layout=memory.layout,
                pools=self._pools,
                options=self._options(settings, offset),
                accept=settings.role == "pe",
                gpu=memory.gpu,
            )
            self._opened = stack.pop_all()
        self.role = self._role(memory, offset, by_request)
        self._peers_file = PeersFile(Path(settings.peers_file)) if settings.peers_file else None
        self._status_file: StatusFile | None = None
        if settings.status_file and rank == 0:
            facts = {"page_tokens": memory.layout.page_tokens, "page_bytes": memory.layout.page_bytes}
            self._status_file = StatusFile(Path(settings.status_file), rank, facts)
        self._inbox: queue.SimpleQueue[_Posted | _Question] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvrail", daemon=True)
        self._thread.start()

    # --- called by vLLM's thread ------------------------------------------------------------------------------

    def post(self, facts: StepFacts | LayerDone, after: _ucx.CudaFence | None = None) -> None:
        """Facts of a step, or of one of its layers, which are computed when `after` is done. Returns at once."""
        self._inbox.put(_Posted(facts, after))
        os.eventfd_write(self._wake, 1)

    def settle(self, request_ids: list[str], within_s: float) -> None:
        """PE: these were preempted. Waits until nothing of their blocks is read; what then still is, is given up."""
        role = self.role
        if not isinstance(role, Pushing) or not request_ids:
            return
        try:
            self._settle(role, request_ids, within_s)
        except TransferError as error:
            _log.error("%s, while vLLM preempts %s", error, ", ".join(request_ids))

    def _settle(self, role: Pushing, request_ids: list[str], within_s: float) -> None:
        self._ask(lambda _: role.preempted(request_ids))
        deadline = time.monotonic() + within_s
        pending = list(request_ids)
        while pending and time.monotonic() < deadline:
            pending = self._ask(lambda _: [one for one in request_ids if not role.unread(one)])
            if pending:
                time.sleep(0.0005)
        if pending:
            self._ask(lambda now: role.give_up(now, pending))

    def gauges(self) -> dict[str, int]:
        """What is held, all zero at idle."""
        return self._ask(lambda _: self.role.gauges())

    def counters(self) -> dict[str, int]:
        """What has happened so far."""
        return dict(self.role.counters)

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the links. Memory that a living peer may still write into stays registered until the process ends."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(10)

    # --- the thread -------------------------------------------------------------------------------------------

    def _ask(self, work: Callable[[float], _T]) -> _T:
        """The result of `work(now)` on the service's thread; raises TransferError when that has ended."""
        answer: list[_T] = []
        done = threading.Event()
        self._inbox.put(_Question(lambda now: answer.append(work(now)), done))
        os.eventfd_write(self._wake, 1)
        if not done.wait(_ANSWER_S) or not answer:
            raise TransferError("the transfer thread does not answer")
        return answer[0]

    def _run(self) -> None:
        poller = select.epoll()
        poller.register(self._links.fileno(), select.EPOLLIN)
        poller.register(self._wake, select.EPOLLIN)
        steps = 0
        try:
            while not self._closing:
                due = self.role.next_deadline()
                wait_s = _TURN_S if due is None else min(_TURN_S, max(0.0, due - time.monotonic()))
                poller.poll(wait_s)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                steps += 1
                self._turn(steps)
        except Exception:
            _log.exception("the transfer thread has failed: nothing more is granted or pushed by this engine")
            self._end()
            self.role.abandon()
            self._refuse_all(poller)
        else:
            self._end()
        finally:
            poller.close()
            os.close(self._wake)

    def _turn(self, steps: int) -> None:
        now = time.monotonic()
        for event in self._links.poll(now):
            self.role.on_link(now, event)
            if self._status_file is not None:
                self._status_file.note(event)
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, _Question):
                item.work(now)
                item.done.set()
            elif isinstance(item.facts, LayerDone):
                if isinstance(self.role, Pushing):
                    self.role.handle_layer(now, item.facts, item.after)
            elif isinstance(self.role, Pushing):
                self.role.handle(now, item.facts, item.after)
            else:
                self.role.handle(now, item.facts)
        self.role.tick(now)
        self.role.beat(steps)
        self._front_files(now)

    def _front_files(self, now: float) -> None:
        role = self.role
        links: dict[LinkKey, tuple[str, float]] = {}
        if isinstance(role, Landing):
            if self._peers_file is not None and (peers := self._peers_file.read(now)) is not None:
                role.set_peers(peers)
            for (host, port), key in role.places.items():
                if key is not None:
                    links[key] = f"{host}:{port}", role.arrived[host, port]
        if self._status_file is not None:
            self._status_file.tick(now, links, lambda: (role.gauges(), self._counts()))

    def _counts(self) -> dict[str, float]:
        """Counters for the front; of pushes that a GPU makes also how long it had any, which gives their speed."""
        found: dict[str, float] = dict(self.role.counters)
        if self.cuda is not None and isinstance(self.role, Pushing):
            stats = self._reactor.stats()
            found |= {"gpu_copied_bytes": stats["gpu_bytes"], "gpu_copying_seconds": stats["gpu_ns"] / 1e9}
        return found

    def _refuse_all(self, poller: select.epoll) -> None:
        """vLLM must not wait for a thread that failed."""
        while not self._closing:
            poller.poll(1.0)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            while not self._inbox.empty():
                item = self._inbox.get_nowait()
                if isinstance(item, _Question):
                    item.done.set()
                elif isinstance(item.facts, StepFacts):
                    self.role.refuse(item.facts)

    def _end(self) -> None:
        with contextlib.suppress(TransferError):
            if self._links.close():
                self._pools.close()
                self._opened.close()

    def _role(self, memory: Memory, offset: int, by_request: bool) -> Pushing | Landing:
        settings, (incarnation, rank) = self._settings, self.identity
        if settings.role == "pe":
            sender = Sender(
                memory.layout,
                incarnation=incarnation,
                rank=rank,
                max_tickets=_MOST_TICKETS,
                meet_s=settings.meet_s,
            )
            return Pushing(
                links=self._links,
                sender=sender,
                pools=self._pools,
                layout=memory.layout,
                parts=Parts(memory.geometry, memory.groups),
                results=self.results,
            )
        blocks = GivenBlocks()
        receiver = Receiver(
            blocks,
            memory.layout,
            incarnation=incarnation,
            rank=rank,
            link_share=1.0,
            ttl_s=settings.ticket_ttl_s,
        )
        return Landing(
            links=self._links,
            receiver=receiver,
            blocks=blocks,
            results=self.results,
            peers=settings.peers,
            offset=offset,
            by_request=by_request,
            cuda=memory.cuda,
        )

    @staticmethod
    def _options(settings: Settings, offset: int) -> LinkOptions:
        return LinkOptions(
            socket_dir=settings.runtime_dir / "vllm-links",
            kv_host=settings.kv_host,
            kv_port=settings.kv_port + offset if settings.role == "pe" else 0,
            lane=settings.lane,
            put_transport=settings.put_transport,
            require_lane=settings.require_lane,
            heartbeat_s=settings.heartbeat_s,
            stuck_s=settings.ticket_ttl_s,
        )
