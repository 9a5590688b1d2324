# SPDX-License-Identifier: Apache-2.0
"""The PE's end of every beginning: two listening sockets, and the judgement of each offer that comes in."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Generator

from kvrail.transfer import control_socket, handshake
from kvrail.transfer.connector import LinkSetup, NewLink, Talk
from kvrail.transfer.control_socket import ControlStream, Frame, PeerProcess
from kvrail.transfer.errors import LinkRefused, TransferError
from kvrail.transfer.handshake import Accept, Introduction, Offer, Turn
from kvrail.transfer.lanes import Facts, Wishes, mps_refusal, no_peer, plan_lanes
from kvrail.transfer.layout import require_equal
from kvrail.transfer.link_events import LinkKey, LinkRefusal, PeerAddress

__all__ = ["Listener"]

# Of a CUDA IPC handle.
_HANDLE_BYTES = 64
# Strangers that may be in a handshake at once; more are turned away at the door, unless one of these has said nothing
# for a moment: a crowd that is silent must not keep everybody out for a whole handshake's time.
_MAX_STRANGERS = 64
_MOMENT_S = 1.0


class Listener:
    """A TCP socket on kv_host and a Unix socket in a private folder. `report` gets new links and refusals."""

    def __init__(
        self,
        setup: LinkSetup,
        selector: selectors.BaseSelector,
        report: Callable[[NewLink | LinkRefusal, float], None],
    ) -> None:
        self._setup = setup
        self._selector = selector
        self._report = report
        self._last_epoch: dict[LinkKey, int] = {}
        self._local_failed: dict[LinkKey, str] = {}
        # A CE that is refused comes again and again: the same reason is told once.
        self._told: dict[LinkKey, str] = {}
        # When each began, the oldest first.
        self._talks: dict[Talk, float] = {}
        name = f"link-{setup.me.incarnation.hex()[:12]}-{setup.me.rank}.sock"
        self._path = setup.options.socket_dir / name
        self._sockets = [control_socket.listen_tcp(setup.options.kv_host, setup.options.kv_port)]
        try:
            self._sockets.append(control_socket.listen_unix(self._path))
        except BaseException:
            self._sockets[0].close()
            raise
        for sock in self._sockets:
            selector.register(sock, selectors.EVENT_READ, self._acceptor(sock))

    @property
    def address(self) -> PeerAddress:
        """What a dialer needs."""
        host, port = self._sockets[0].getsockname()[:2]
        return PeerAddress(*self._setup.me, host, port, str(self._path))

    def local_lanes_failed(self, key: LinkKey, reason: str) -> None:
        """Use only network transports with this peer from now on."""
        self._local_failed[key] = reason

    def tick(self, now: float) -> None:
        for talk in list(self._talks):
            talk.tick(now)

    def close(self) -> None:
        for talk in self._talks:
            talk.drop()
        self._talks.clear()
        for sock in self._sockets:
            self._selector.unregister(sock)
            sock.close()
        self._path.unlink(missing_ok=True)

    def _acceptor(self, listener: socket.socket) -> Callable[[float], None]:
        return lambda now: self._accept(listener, now)

    def _accept(self, listener: socket.socket, now: float) -> None:
        # All who wait, as this comes between two steps of a model; at most so many, as others wait for those.
        for _ in range(_MAX_STRANGERS):
            try:
                sock, _ = listener.accept()
            except ConnectionAbortedError:
                continue  # It hung up before we answered.
            except OSError:
                return
            if len(self._talks) < _MAX_STRANGERS or self._make_room(now):
                self._hear_out(sock, now)
            else:
                sock.close()

    def _make_room(self, now: float) -> bool:
        """Send the oldest away who has said nothing, if he had his moment. Returns whether there is room."""
        for talk in [talk for talk, begun in self._talks.items() if talk.silent and begun + _MOMENT_S <= now]:
            # He may have spoken while we were busy.
            talk.advance(now)
            if talk.silent:
                talk.drop()
                self._talks.pop(talk, None)
            if len(self._talks) < _MAX_STRANGERS:
                return True
        return False

    def _hear_out(self, sock: socket.socket, now: float) -> None:
        process: PeerProcess | None = None
        try:
            if sock.family == socket.AF_UNIX:
                process = control_socket.peer_process(sock)
            else:
                control_socket.tune_tcp(sock)
        except (LinkRefused, OSError) as error:
            sock.close()
            self._report(LinkRefusal(None, str(error)), now)
            return
        talk = Talk(self._selector, ControlStream(sock), process, self._ended)
        self._talks[talk] = now
        talk.begin(self._handshake(talk), now, now + self._setup.options.handshake_s)

    def _ended(self, talk: Talk, outcome: NewLink | TransferError | None, now: float) -> None:
        self._talks.pop(talk, None)
        if outcome is None:  # It only asked who is here.
            talk.close()
            return
        key, reason = talk.key, str(outcome)
        if not isinstance(outcome, TransferError):
            self._told.pop(outcome.key, None)
            self._report(outcome, now)
        elif key is None or self._told.get(key) != reason:
            if key is not None:
                self._told[key] = reason
            self._report(LinkRefusal(key, reason), now)

    def _handshake(self, talk: Talk) -> Generator[Turn | None, Frame, Turn]:
        def judge(key: LinkKey, offer: Offer, fds: tuple[int, ...], secret: bytes) -> Accept:
            talk.key = key
            try:
                return self._judge(key, offer, fds, secret, talk)
            except BaseException:
                for fd in fds if not talk.fds else ():
                    os.close(fd)
                raise

        def introduce() -> Introduction:
            talk.made = lambda: None
            return Introduction(
                incarnation=self._setup.me.incarnation, rank=self._setup.me.rank, unix_path=str(self._path)
            )

        return handshake.accepting(self._setup.token, self._setup.me, os.urandom(32), judge, introduce)

    def _judge(self, key: LinkKey, offer: Offer, fds: tuple[int, ...], secret: bytes, talk: Talk) -> Accept:
        setup = self._setup
        if offer.ucx[:2] != setup.ucx_version[:2]:
            pe, ce = (".".join(map(str, version)) for version in (setup.ucx_version, offer.ucx))
            raise LinkRefused(
                f"UCX versions differ: {pe} on the pe, {ce} on the ce (they do not interoperate)"
            )
        require_equal(setup.layout, offer.layout)
        if not (
            0 <= offer.epoch < 1 << 32 and 0 <= offer.cookie < 1 << 64 and 0 <= offer.probe_unit < 1 << 31
        ) or (offer.stream and not 0 < offer.stream[1] < 1 << 16):
            raise LinkRefused("a number in the offer is out of range")
        last = self._last_epoch.get(key, 0)
        if offer.epoch <= last:
            raise LinkRefused(f"link epoch {offer.epoch} is not newer than {last}")
        _check_pools(setup, offer, fds)
        wishes = (Wishes.of(setup.options), Wishes(offer.lane, offer.put_transport, offer.require_lane))
        plan = plan_lanes(*wishes, self._facts(key, offer, shared=bool(fds)))
        network = plan.scope == "network"
        theirs_address = offer.network_address if network else offer.address
        if not theirs_address:
            raise LinkRefused("the offer has no worker address for the lanes that are left")
        native = setup.reactor.open_link(epoch=offer.epoch, cookie=offer.cookie)
        self._last_epoch[key] = offer.epoch
        # From here on the fds are the talk's, which may still fail.
        talk.native, talk.fds = native, fds
        talk.made = lambda: NewLink(
            key, offer.epoch, native, talk.stream, theirs_address, talk.process, offer, fds, plan, secret
        )
        return Accept(scope=plan.scope, address=native.address(network_only=network))

    def _facts(self, key: LinkKey, offer: Offer, *, shared: bool) -> Facts:
        ours, theirs = self._setup.gpu, offer.gpu
        return Facts(
            distance=offer.distance,
            shared=shared,
            local_failed=self._local_failed.get(key, ""),
            source=self._setup.pools.memory,
            target="host" if theirs is None else "cuda",
            no_peer=no_peer(ours, theirs),
            no_stream="" if offer.stream else "the completion engine does not listen for it",
            mps=mps_refusal(ours, theirs),
        )


def _check_pools(setup: LinkSetup, offer: Offer, fds: tuple[int, ...]) -> None:
    """The offered pools are those that we have, and each memfd is what it is said to be."""
    # (Equal layouts, so pools of the same kinds as ours.)
    expected = {pool_id: pool.unit_bytes for pool_id, pool in setup.pools.by_id()}
    offered = {entry.pool: entry.unit_bytes for entry in offer.pools}
    if offered != expected or len(offered) != len(offer.pools):
        raise LinkRefused(f"pools differ (id: bytes of a unit): {expected} on the pe, {offered} on the ce")
    if fds and sorted(entry.fd for entry in offer.pools) != list(range(len(fds))):
        raise LinkRefused("the offer does not say which pool each file descriptor is")
    memory = "host" if offer.gpu is None else "cuda"
    for entry in offer.pools:
        if entry.memory != memory:
            raise LinkRefused(
                f"pool {entry.pool} is in {entry.memory} memory, the offer is of {memory} memory"
            )
        if entry.handle and (len(entry.handle) != _HANDLE_BYTES or not 0 <= entry.handle_offset < 1 << 48):
            raise LinkRefused(f"pool {entry.pool}: the handle of its GPU memory is malformed")
        fits = entry.nbytes > 0 and entry.base > 0 and entry.base + entry.nbytes < 1 << 63
        if not fits or entry.nbytes % entry.unit_bytes:
            raise LinkRefused(f"pool {entry.pool}: {entry.nbytes} bytes at {entry.base}")
        if fds:
            control_socket.check_memfd(fds[entry.fd], entry.nbytes)
