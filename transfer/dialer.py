# SPDX-License-Identifier: Apache-2.0
"""The CE's end of every beginning: dial the wanted peers, over the nearest way, again and again with back-off."""

from __future__ import annotations

import itertools
import os
import random
import selectors
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvrail.transfer import control_socket, handshake
from kvrail.transfer.connector import AnyPool, LinkSetup, NewLink, Talk
from kvrail.transfer.control_socket import ControlStream, Frame, PeerBusy, PeerProcess
from kvrail.transfer.errors import TransferError
from kvrail.transfer.handshake import Offer, PoolOffer, Turn, WrongPeer
from kvrail.transfer.interfaces import with_our_scope
from kvrail.transfer.link_events import LinkKey, LinkRefusal, PeerLike
from kvrail.transfer.memory import HostPool
from kvrail.transfer.stream_socket import listen_stream

if TYPE_CHECKING:
    from kvrail.transfer import _ucx

__all__ = ["Dialer"]


class _Wanted:
    """One peer that we keep a link to."""

    def __init__(self, peer: PeerLike) -> None:
        self.peer = peer
        self.key = LinkKey(peer.incarnation, peer.rank)
        self.attempts = 0
        self.due_at = 0.0
        self.linked = False
        self.talk: Talk | None = None
        self.told = ""
        # Why the Unix socket is of no use ("" as long as it may be).
        self.no_unix = "" if peer.unix_path else "the peer names no Unix socket"


class Dialer:
    """Dials each wanted peer unless it is linked. `report` gets new links, and refusals whose reason is new."""

    def __init__(
        self,
        setup: LinkSetup,
        selector: selectors.BaseSelector,
        report: Callable[[NewLink | LinkRefusal, float], None],
    ) -> None:
        self._setup = setup
        self._selector = selector
        self._report = report
        self._wanted: dict[LinkKey, _Wanted] = {}
        # Of all peers, so that no epoch is used twice, not even after a disconnect, and no peer need be remembered.
        self._epochs = itertools.count(1)

    def want(self, peer: PeerLike) -> None:
        key = LinkKey(peer.incarnation, peer.rank)
        if key not in self._wanted:
            self._wanted[key] = _Wanted(peer)

    def unwant(self, key: LinkKey) -> None:
        wanted = self._wanted.pop(key, None)
        if wanted is not None and wanted.talk is not None:
            wanted.talk.drop()

    def lost(self, key: LinkKey, now: float, *, reason: str = "") -> None:
        """The link is over (it was never up: for `reason`): dial again after a while."""
        wanted = self._wanted.get(key)
        if wanted is not None:
            wanted.linked = False
            self._wait(wanted, now)
            if reason:
                self._tell(wanted, reason, now)

    def up(self, key: LinkKey) -> None:
        """The link works: the next loss starts with a short wait again."""
        wanted = self._wanted.get(key)
        if wanted is not None:
            wanted.attempts, wanted.told = 0, ""

    def linked(self, key: LinkKey) -> bool:
        """Whether there is a link to this peer, or one is being tested."""
        wanted = self._wanted.get(key)
        return wanted is not None and wanted.linked

    def opened(self, native_id: int) -> bool:
        """Whether a handshake under way has opened this native link."""
        talks = (wanted.talk for wanted in self._wanted.values())
        return any(talk and talk.native and talk.native.id == native_id for talk in talks)

    def tick(self, now: float) -> None:
        for wanted in list(self._wanted.values()):
            if wanted.talk is not None:
                wanted.talk.tick(now)
            elif not wanted.linked and now >= wanted.due_at:
                self._dial(wanted, now)

    def close(self) -> None:
        for key in list(self._wanted):
            self.unwant(key)

    def _dial(self, wanted: _Wanted, now: float) -> None:
        try:
            stream, process, distance = self._open(wanted)
        except (TransferError, OSError, ValueError) as error:
            # OSError: no file descriptors here. ValueError: the peer's path is none.
            self._wait(wanted, now)
            self._tell(wanted, str(error), now)
            return
        talk = Talk(self._selector, stream, process, lambda _, outcome, at: self._ended(wanted, outcome, at))
        talk.key = wanted.key
        wanted.talk = talk
        generator = self._handshake(wanted.key, talk, distance)
        talk.begin(generator, now, now + self._setup.options.handshake_s)

    def _open(self, wanted: _Wanted) -> tuple[ControlStream, PeerProcess | None, str]:
        """(stream, the process at its end, why no same-host lane can be had) over the nearest way."""
        distance = wanted.no_unix
        if not distance:
            try:
                stream = control_socket.dial_unix(Path(wanted.peer.unix_path))
            except PeerBusy:
                raise  # The other way would work now, and be slow for the life of the link.
            except TransferError as error:
                distance = f"no Unix socket: {error}"
            else:
                try:
                    process = control_socket.peer_process(stream.socket)
                except TransferError as error:
                    stream.close()
                    distance = str(error)
                else:
                    return stream, process, process.reason
        host = with_our_scope(wanted.peer.host, self._setup.options.kv_host)
        return control_socket.dial_tcp(host, wanted.peer.port), None, distance

    def _ended(self, wanted: _Wanted, outcome: NewLink | TransferError | None, now: float) -> None:
        process = wanted.talk.process if wanted.talk is not None else None
        wanted.talk = None
        if isinstance(outcome, NewLink):
            wanted.linked = True
            self._report(outcome, now)
            return
        if isinstance(outcome, WrongPeer) and process is not None:
            # A socket of that name belongs to an engine of this host; the peer that we mean may be on another one.
            wanted.no_unix = f"the Unix socket is not the peer's ({outcome})"
            return
        self._wait(wanted, now)
        self._tell(wanted, str(outcome), now)

    def _wait(self, wanted: _Wanted, now: float) -> None:
        options = self._setup.options
        longest = min(options.redial_max_s, options.redial_min_s * 2**wanted.attempts)
        wanted.attempts = min(wanted.attempts + 1, 16)
        # Jitter, so that many ranks that lost one peer do not come back all at once.
        wanted.due_at = now + longest * random.uniform(0.5, 1.0)

    def _tell(self, wanted: _Wanted, reason: str, now: float) -> None:
        if reason != wanted.told:
            wanted.told = reason
            self._report(LinkRefusal(wanted.key, reason), now)

    def _handshake(self, key: LinkKey, talk: Talk, distance: str) -> Generator[Turn, Frame, object]:
        def make_offer() -> tuple[Offer, tuple[int, ...]]:
            epoch = next(self._epochs)
            cookie = int.from_bytes(os.urandom(8), "little")
            talk.native = self._setup.reactor.open_link(epoch=epoch, cookie=cookie)
            if self._setup.options.lane in ("auto", "stream") and self._setup.pools.memory == "host":
                talk.listening = listen_stream(self._setup.options.kv_host)
            return self._offer(talk.native, epoch, cookie, distance, talk.listening)

        offer, accept, secret = yield from handshake.dialing(
            self._setup.token, self._setup.me, key, os.urandom(32), make_offer
        )
        native = talk.native
        assert native is not None
        talk.made = lambda: NewLink(
            key,
            offer.epoch,
            native,
            talk.stream,
            accept.address,
            talk.process,
            offer,
            (),
            None,
            secret,
            talk.listening,
        )
        return offer

    def _offer(
        self,
        native: _ucx.Link,
        epoch: int,
        cookie: int,
        distance: str,
        listening: socket.socket | None = None,
    ) -> tuple[Offer, tuple[int, ...]]:
        setup, options, pools = self._setup, self._setup.options, list(self._setup.pools.by_id())
        # What another process can map our pools with: only given to one whose end we can see.
        near = not distance and options.lane in ("auto", "shm", "peer")
        # All of them or none: lane shm writes every pool through its memfd.
        files = [pool.fd for _, pool in pools if isinstance(pool, HostPool)]
        fds = tuple(files) if near and len(files) == len(pools) else ()
        offer = Offer(
            ucx=setup.ucx_version,
            layout=setup.layout,
            epoch=epoch,
            cookie=cookie,
            address=b"" if distance else native.address(),
            network_address=native.address(network_only=True),
            pools=[_offer(pool_id, pool, fds, handles=near) for pool_id, pool in pools],
            probe_unit=setup.slices.take(),
            lane=options.lane,
            put_transport=options.put_transport,
            require_lane=options.require_lane,
            distance=distance,
            stream=None if listening is None else listening.getsockname()[:2],
            gpu=setup.gpu if setup.pools.memory == "cuda" else None,
        )
        return offer, fds


def _offer(pool_id: int, pool: AnyPool, fds: tuple[int, ...], *, handles: bool) -> PoolOffer:
    offer = PoolOffer(
        pool=pool_id,
        base=pool.address,
        nbytes=pool.nbytes,
        unit_bytes=pool.unit_bytes,
        memory=pool.memory,
        key=pool.packed_key(),
    )
    if isinstance(pool, HostPool):
        return msgspec.structs.replace(offer, fd=fds.index(pool.fd) if fds else -1)
    if not handles or pool.memory != "cuda":
        return offer
    return msgspec.structs.replace(offer, handle=pool.ipc_handle(), handle_offset=pool.ipc_offset)
