# SPDX-License-Identifier: Apache-2.0
"""Links between real processes over real UCX: every lane, every way to die, and what is proven afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.flood import flooding, listening_ports
from kit.link_ranks import LAYOUT, PATIENCE_S, Start, connect, starting
from kit.shm import orphans, segments

pytestmark = pytest.mark.process

LANES = {
    "shm": {"lane": "shm"},
    "put/cma": {"lane": "put", "put_transport": "cma"},
    "put/tcp": {"lane": "put", "put_transport": "tcp"},
    "stream": {"lane": "stream"},
}
# Those of which the CE's own end is a proof.
FENCED = ("put/tcp", "stream")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path / "run") as make:
        yield make


@pytest.mark.parametrize("lane", LANES)
def test_pages_and_messages_cross(start: Start, lane: str) -> None:
    pe, ce = start(True), start(False, **LANES[lane])
    ours, theirs = connect(pe, ce)
    for up in (ours, theirs):
        assert (up["lane"], up["epoch"], up["same_host"]) == (lane, 1, True)
        assert up["fence"] == ("worker" if lane in FENCED else "process")
        assert [probe[0] for probe in up["probes"]] == [4096, 256 << 10, 4 << 20]
        assert all(0 < rate < 1000 and us > 0 for _, rate, us, *_ in up["probes"])
    ce.ask("send", key=pe.key, epoch=1)
    pe.wait("Received", message="Cancel")
    target = [31, 3, 4, 5, 0, 17]
    for page in range(6):
        pe.ask("fill", page=page, value=page + 100)
    pe.ask("push", key=ce.key, writer=5, epoch=1, source=[0, 1, 2, 3, 4, 5], target=target)
    ce.wait("Received", message="Doorbell")
    assert ce.ask("look", pages=target) == [[page + 100] for page in range(6)]
    assert ce.ask("look", pages=[1, 2, 6, 16, 18, 30]) == [[0]] * 6
    pe.wait("WriterEvent", kind="rung", writer=5, ok=True)


@pytest.mark.parametrize("lane", ["put/cma", "put/tcp"])
def test_pages_cross_by_several_threads(start: Start, lane: str) -> None:
    pe, ce = start(True, rails=3), start(False, **LANES[lane])
    ours, theirs = connect(pe, ce)
    assert (ours["lane"], ours["rails"], theirs["rails"], ours["reason"]) == (lane, 3, 3, "")
    for page in range(32):
        pe.ask("fill", page=page, value=page + 100)
    target = list(range(31, -1, -1))
    # 2 MiB each.
    pe.ask("push", key=ce.key, writer=5, epoch=1, source=list(range(32)), target=target, times=20)
    ce.wait("Received", message="Doorbell")
    assert ce.ask("look", pages=target) == [[page + 100] for page in range(32)]
    pe.wait("WriterEvent", kind="rung", writer=5, ok=True)


def test_messages_of_another_epoch_are_dropped(start: Start) -> None:
    pe, ce = start(True), start(False)
    connect(pe, ce)
    ce.ask("send", key=pe.key, epoch=7)
    ce.ask("send", key=pe.key, epoch=1)
    assert pe.wait("Received")["epoch"] == 1


@pytest.mark.parametrize("lane", LANES)
def test_dead_writer_is_proven_quiet(start: Start, lane: str) -> None:
    pe, ce = start(True), start(False, **LANES[lane])
    connect(pe, ce)
    pe.ask("push", key=ce.key, writer=1, epoch=1, source=list(range(32)), target=list(range(32)), times=2000)
    pe.kill()
    assert ce.wait("LinkDown", key=pe.key)["epoch"] == 1
    assert ce.wait("Proven", key=pe.key, epoch=1)["how"] == ("worker" if lane in FENCED else "process")
    assert ce.ask("unproven") == []
    assert ce.ask("close") is True


@pytest.mark.parametrize("lane", LANES)
def test_dead_reader_ends_its_writers(start: Start, lane: str) -> None:
    pe, ce = start(True), start(False, **LANES[lane])
    connect(pe, ce)
    pe.ask("push", key=ce.key, writer=1, epoch=1, source=list(range(32)), target=list(range(32)), times=2000)
    ce.kill()
    pe.wait("LinkDown", key=ce.key)
    assert pe.wait("WriterEvent", writer=1, kind="failed")["ok"] is False
    pe.wait("Proven", key=ce.key, epoch=1, how="worker")
    assert pe.ask("close") is True


@pytest.mark.parametrize("frozen", ["pe", "ce"])
def test_frozen_peer_is_suspect_then_recovers(start: Start, frozen: str) -> None:
    pe, ce = start(True), start(False)
    connect(pe, ce)
    victim, watcher = (pe, ce) if frozen == "pe" else (ce, pe)
    victim.process.send_signal(signal.SIGSTOP)
    watcher.wait("Suspect", key=victim.key)
    watcher.expect_none("Recovered", 1.0)
    victim.process.send_signal(signal.SIGCONT)
    watcher.wait("Recovered", key=victim.key)
    watcher.expect_none("LinkDown", 0.5)
    ce.ask("send", key=pe.key, epoch=1)
    pe.wait("Received")
    # Its own stop was not held against the other side.
    victim.expect_none("Suspect", 0.5)


def test_stuck_loop_is_not_a_dead_process(start: Start) -> None:
    pe, ce = start(True), start(False, stuck_s=0.5)
    connect(pe, ce)
    ce.expect_none("PeerStuck", 1.5)
    pe.ask("freeze_steps")
    ce.wait("PeerStuck", key=pe.key)
    ce.expect_none("Suspect", 0.5)


@pytest.mark.parametrize("lane", FENCED)
def test_fence_over_tcp_proves_at_once_and_links_again(start: Start, lane: str) -> None:
    pe, ce = start(True), start(False, **LANES[lane])
    connect(pe, ce)
    pe.process.send_signal(signal.SIGSTOP)
    ce.ask("fence", key=pe.key)
    ce.wait("LinkDown", epoch=1)
    ce.wait("Proven", key=pe.key, epoch=1, how="worker")
    pe.process.send_signal(signal.SIGCONT)
    assert ce.wait("LinkUp", key=pe.key)["epoch"] == 2
    assert pe.wait("LinkUp", key=ce.key, epoch=2)["lane"] == lane
    assert pe.wait("LinkDown")["epoch"] == 1


def test_fence_of_shared_memory_is_proven_by_death_only(start: Start) -> None:
    pe, ce = start(True), start(False, **LANES["shm"])
    connect(pe, ce)
    ce.ask("fence", key=pe.key)
    ce.wait("LinkDown", epoch=1)
    assert ce.wait("LinkUp", key=pe.key)["epoch"] == 2
    ce.expect_none("Proven", 1.0)
    assert ce.ask("unproven") == [[*pe.key, 1]]
    pe.kill()
    assert {ce.wait("Proven", key=pe.key, how="process")["epoch"] for _ in range(2)} == {1, 2}


def test_pools_stay_while_a_live_writer_is_unproven(start: Start) -> None:
    pe, ce = start(True), start(False, **LANES["shm"])
    connect(pe, ce)
    assert ce.ask("close") is False
    pe.wait("LinkDown", key=ce.key)


def test_dead_peer_does_not_disturb_another(start: Start) -> None:
    pe, other, ce = start(True), start(True), start(False)
    connect(pe, ce)
    epoch = connect(other, ce)[0]["epoch"]
    pe.process.send_signal(signal.SIGSTOP)
    ce.wait("Suspect", key=pe.key)
    pe.kill()
    ce.wait("Proven", key=pe.key)
    other.ask("fill", page=0, value=9)
    other.ask("push", key=ce.key, writer=1, epoch=epoch, source=[0], target=[8])
    ce.wait("Received", key=other.key, message="Doorbell")
    assert ce.ask("look", pages=[8]) == [[9]]
    ce.expect_none("Suspect", 0.5)


def test_without_unix_socket_only_the_network_is_used(start: Start) -> None:
    pe, ce = start(True), start(False)
    for up in connect(pe, ce, unix=False):
        # Whichever of the two was the faster.
        assert up["lane"] in FENCED
        assert (up["fence"], up["same_host"], len(up["probes"])) == ("worker", False, 4)
        assert "Unix socket" in up["reason"]
    pe.kill()
    ce.wait("Proven", epoch=1, how="worker")


def test_foreign_unix_socket_is_passed_over(start: Start) -> None:
    """The path leads to another engine of this host; the one that is meant is reached over TCP."""
    pe, other, ce = start(True), start(True), start(False)
    peer = pe.ask("address")
    peer[-1] = other.ask("address")[-1]
    ce.ask("connect", peer=peer)
    assert "not the peer's" in ce.wait("LinkUp", key=pe.key)["reason"]


REFUSALS = {
    "layout": ({"layout": LAYOUT | {"page_tokens": 32}}, {}, "page_tokens"),
    "token": ({"token": "11" * 32}, {}, "cluster token"),
    "lane": ({"require_lane": "put"}, {"lane": "shm"}, "required: put"),
    "transport": ({"lane": "put", "require_lane": "put/rc_mlx5"}, {}, "put/rc_mlx5 is required"),
}


@pytest.mark.parametrize(("ce_way", "pe_way", "word"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_reason_on_both_sides(
    start: Start, ce_way: dict[str, Any], pe_way: dict[str, Any], word: str
) -> None:
    pe, ce = start(True, **pe_way), start(False, **ce_way)
    ce.ask("connect", peer=pe.ask("address"))
    assert word in ce.wait("LinkRefusal", key=pe.key)["reason"]
    assert word in pe.wait("LinkRefusal")["reason"]
    # It is tried again, but not told again.
    ce.expect_none("LinkRefusal", 1.0)
    ce.ask("disconnect", key=pe.key)


@pytest.mark.parametrize("lane", ["put/cma", "put/tcp"])
def test_emulated_puts_are_refused_with_the_reason(start: Start, lane: str) -> None:
    """With rendezvous on, UCX has no zero-copy put in peer error mode; slow emulation must not go unnoticed."""
    rendezvous = {"RNDV_THRESH": "auto"}
    pe, ce = start(True, ucx=rendezvous), start(False, ucx=rendezvous, **LANES[lane])
    ce.ask("connect", peer=pe.ask("address"))
    assert "self-test put failed" in pe.wait("LinkRefusal", key=ce.key)["reason"]
    assert "self-test put failed" in ce.wait("LinkRefusal", key=pe.key)["reason"]
    ce.expect_none("LinkUp", 0.5)


def test_late_peer_is_dialed_until_it_is_there(start: Start) -> None:
    pe, ce = start(True), start(False)
    peer = pe.ask("address")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    ce.ask("connect", peer=[*peer[:3], port, ""])
    assert "refused" in ce.wait("LinkRefusal", key=pe.key)["reason"].lower()
    ce.ask("disconnect", key=pe.key)
    connect(pe, ce)


def test_strangers_get_nothing_and_hurt_nobody(start: Start) -> None:
    pe, ce = start(True), start(False)
    incarnation, _, host, port, _ = pe.ask("address")
    with contextlib.ExitStack() as stack:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x02\x00\x00\x00\xc1\xc1"):
            stranger = stack.enter_context(socket.create_connection((host, port), timeout=PATIENCE_S))
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert not said or incarnation.encode() not in stranger.recv(4096)
        connect(pe, ce)


def _listening(pid: int) -> set[str]:
    """Hosts of the listening TCP and UDP sockets of a process, as /proc writes them."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    hosts = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            listens = fields[3] == "0A" or table.startswith("udp")
            if listens and f"socket:[{fields[9]}]" in inodes:
                hosts.add(fields[1].partition(":")[0])
    return hosts


RAILS = pytest.mark.parametrize(
    ("rails", "options"),
    [(0, {}), (3, {"lane": "put", "put_transport": "tcp"}), (0, {"lane": "stream"})],
    ids=["auto", "tcp-3", "stream"],
)


@RAILS
def test_listens_on_the_kv_host_only(start: Start, rails: int, options: dict[str, Any]) -> None:
    pe, ce = start(True, rails=rails), start(False, **options)
    connect(pe, ce)
    loopback = {"0100007F"}
    assert _listening(pe.process.pid) == loopback
    assert _listening(ce.process.pid) <= loopback


@RAILS
def test_links_leave_nothing_behind(start: Start, rails: int, options: dict[str, Any]) -> None:
    """Descriptors return to what they were after many links; nothing appears in /dev/shm."""
    left = orphans()
    pe, ce = start(True, rails=rails), start(False, redial_min_s=0.01, **options)
    connect(pe, ce)
    counts = []
    for epoch in range(1, 6):
        ce.ask("fence", key=pe.key)
        ce.wait("LinkDown", epoch=epoch)
        ce.wait("LinkUp", epoch=epoch + 1)
        pe.wait("LinkUp", epoch=epoch + 1)
        pe.wait("Proven", epoch=epoch)
        time.sleep(0.2)  # The native thread closes the old link's sockets.
        counts.append((pe.ask("fds"), ce.ask("fds")))
    assert counts[-1] == counts[0], counts
    assert not segments(pe.process.pid) | segments(ce.process.pid)
    ce.kill()
    pe.kill()
    assert orphans() <= left


@pytest.mark.parametrize("lane", FENCED)
def test_a_flood_on_every_port_of_a_link_keeps_it_from_nothing(start: Start, lane: str) -> None:
    """Hundreds of silent strangers, from other processes: once a port is open, and again while pages are pushed."""
    pe, ce = start(True), start(False, **LANES[lane])
    assert pe.key
    assert ce.key
    with contextlib.ExitStack() as floods:
        flood = floods.enter_context(flooding(300, "of", pe.process.pid, ce.process.pid))
        assert flood.stdout is not None
        assert flood.stdout.readline() == "watching\n"
        ours, theirs = connect(pe, ce)
        assert (ours["lane"], theirs["lane"], ours["epoch"]) == (lane, lane, 1)
        # (At least on those of UCX, which are open for the life of the link. That of lane stream is open for moments:
        # loopback/test_stream.py floods it.)
        assert flood.stdout.readline().startswith("flood")
        for page in range(32):
            pe.ask("fill", page=page, value=page + 100)
        source, target = list(range(32)), list(range(31, -1, -1))
        pe.ask("push", key=ce.key, writer=5, epoch=1, source=source, target=target, times=400)
        for rank in (pe, ce):
            for host, port in listening_ports(rank.process.pid):
                more = floods.enter_context(flooding(300, "at", host, port))
                assert more.stdout is not None
                assert more.stdout.readline().startswith("flood")
        ce.wait("Received", message="Doorbell")
        assert ce.ask("look", pages=target) == [[page + 100] for page in range(32)]
        ce.expect_none("LinkDown", 0.5)


def test_a_crowd_at_the_door_keeps_nobody_out_for_long(start: Start) -> None:
    """More silent strangers than are heard at once, on the port where links begin."""
    pe, ce = start(True), start(False, lane="stream")
    assert ce.key
    *_, host, port, _unix = pe.ask("address")
    with flooding(300, "at", host, port) as flood:
        assert flood.stdout is not None
        assert [flood.stdout.readline().split()[0] for _ in range(2)] == ["flood", "done"]
        begun = time.monotonic()
        connect(pe, ce, unix=False)
        # Half of a handshake's time, which they would otherwise have.
        assert time.monotonic() - begun < 15
