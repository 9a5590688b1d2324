# SPDX-License-Identifier: Apache-2.0
"""One link from the end of its handshake to its end: the lane is tested, then messages, writers and beats flow."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Literal

from kvrail.transfer.connector import LinkSetup, NewLink
from kvrail.transfer.errors import LaneUnavailable
from kvrail.transfer.gpu import Offered, offered
from kvrail.transfer.heart import Heart
from kvrail.transfer.lane_test import News, check_self_test, lane_test
from kvrail.transfer.lanes import Wishes, fence_class
from kvrail.transfer.link_events import Fence, LaneInfo, Probe
from kvrail.transfer.wire import LaneChosen, SelfTest, encode

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["RankLink"]


class RankLink:
    """One link epoch: `testing` → `up` (or `refused`) → `down`, where the native worker may live on a little."""

    def __init__(self, new: NewLink, setup: LinkSetup, writer_keys: Iterator[int], now: float) -> None:
        self.key = new.key
        self.epoch = new.epoch
        self.native: _ucx.Link = new.native
        self.state: Literal["testing", "refused", "up", "down"] = "testing"
        self.lane: LaneInfo | None = None
        # Until the lane is known, the worst is assumed: pools may be mapped as soon as memfds and handles are out.
        self.fence: Fence = "process" if new.offer.address else "worker"
        self.was_up = False
        self.refusal = ""
        self.plan = new.plan
        self.heart = Heart(new.key, setup.options, now)
        # A peer that dies meanwhile is found out by its control stream; this is for one that never gets on.
        self.deadline = now + 4 * setup.options.handshake_s
        self.peer_units = {entry.pool: entry.nbytes // entry.unit_bytes for entry in new.offer.pools}
        self._offer = new.offer
        self._pools = setup.pools
        self._fds = new.fds
        self._test: Generator[None, News, LaneInfo] | None = None
        if new.plan is not None:
            offer = new.offer
            wishes = (Wishes.of(setup.options), Wishes(offer.lane, offer.put_transport, offer.require_lane))
            self._test = lane_test(
                new.native,
                offer,
                new.plan,
                wishes,
                new.fds,
                setup.pools.probe,
                setup.slices.take(),
                writer_keys,
                _hardware(setup, new),
                # UCX needs its CUDA context on every thread that it runs on; only the progress thread has it.
                1 if setup.gpu is not None else setup.options.rails,
                new.secret,
                setup.options.kv_host,
            )

    def begin(self, new: NewLink, heartbeat_s: float) -> None:
        """Connect UCX and hand the sockets to native threads. Raises what the native module raises."""
        fd = new.stream.detach()
        listening = -1 if new.listening is None else new.listening.detach()
        try:
            self.native.connect(new.peer_address)
            self.native.attach_control(fd, max(1, round(heartbeat_s * 1000)))
        except BaseException:
            os.close(fd)
            if listening >= 0:
                os.close(listening)
            raise
        if listening >= 0:
            pools = [
                (pool_id, pool.address, pool.nbytes, pool.unit_bytes) for pool_id, pool in self._pools.by_id()
            ]
            self.native.read_stream(listening, secret=new.secret, pools=pools)

    def start_test(self) -> LaneInfo | None:
        """PE: post the self-test. Raises LaneUnavailable."""
        return self._run(None)

    def on_test_news(self, news: News) -> LaneInfo | None:
        """PE: an event of a test writer, or the CE's verdict. Returns the lane when it is decided."""
        return self._run(news)

    def _run(self, news: News | None) -> LaneInfo | None:
        if self._test is None:
            return None  # The lane is decided; this is late news.
        try:
            if news is None:
                next(self._test)
            else:
                self._test.send(news)
        except StopIteration as end:
            self._set_lane(end.value)
            self.native.send(encode(self._chosen()))
            return self.lane
        except LaneUnavailable as error:
            self._drop_test()
            self.native.send(encode(LaneChosen(epoch=self.epoch, name="", reason=str(error))))
            raise
        return None

    def on_lane(self, chosen: LaneChosen) -> LaneInfo:
        """CE: the PE has decided. Raises LaneUnavailable when it found none."""
        if chosen.name == "":
            raise LaneUnavailable(chosen.reason)
        lane = LaneInfo(
            chosen.name,
            chosen.transport,
            chosen.memory,
            # The worse of what the PE says and of what we see ourselves: pages are freed by this.
            "process" if chosen.fence == "process" else fence_class(chosen.name, self.native.transports()),
            tuple(Probe(*probe) for probe in chosen.probes),
            chosen.reason,
            not self._offer.distance,
            chosen.slow,
            chosen.rails,
        )
        self.native.settle_stream(lane.name == "stream")
        self._set_lane(lane)
        return lane

    def answer_test(self, test: SelfTest) -> None:
        """CE: look at what came into the probe pool, and say so."""
        self.native.send(encode(check_self_test(test, self._pools.probe)))

    def refuse(self, reason: str, deadline: float) -> None:
        """PE: no lane works. The CE has been told, and is to hang up before the deadline."""
        self.refusal, self.deadline, self.state = reason, deadline, "refused"

    def end(self) -> None:
        """The link is over: destroy its worker, so that what can be proven that way is proven."""
        self.state = "down"
        self._drop_test()
        self.native.fence()

    def _set_lane(self, lane: LaneInfo) -> None:
        self._drop_test()
        self.lane, self.fence, self.state, self.was_up = lane, lane.fence, "up", True

    def _drop_test(self) -> None:
        self._test = None
        for fd in self._fds:
            os.close(fd)  # What was imported stays mapped.
        self._fds = ()

    def _chosen(self) -> LaneChosen:
        lane = self.lane
        assert lane is not None
        return LaneChosen(
            epoch=self.epoch,
            name=lane.name,
            transport=lane.transport,
            memory=lane.memory,
            fence=lane.fence,
            probes=[probe[:] for probe in lane.probes],
            reason=lane.reason,
            slow=lane.slow,
            rails=lane.rails,
        )


def _hardware(setup: LinkSetup, new: NewLink) -> Offered | None:
    """What lies between our pages and the peer's, as far as both are on this host and one is on a GPU."""
    if new.plan is None or new.plan.scope == "network":
        return None
    if setup.pools.memory == "cuda":
        return offered(setup.gpu, new.offer.gpu)
    # Our GPU reads our host memory, and that is the narrow part wherever it writes to.
    return offered(setup.gpu, None) if new.offer.gpu is not None else None
