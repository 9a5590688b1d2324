# SPDX-License-Identifier: Apache-2.0
"""transfer-bench between two hosts: one command a host, whose clocks differ; and what happens without the other one."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.namespaces import two_hosts

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

WAYS = ("stream", "put", "socket")
SMALL = ["--page-bytes", "4096", "--pages", "8", "--rounds", "3", *(f"--way={way}" for way in WAYS)]
DAY_S = 86400


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])


class Ranks(contextlib.ExitStack):
    """Started commands, none of which outlives the test."""

    def __init__(self, meet_at: str) -> None:
        super().__init__()
        self.meet_at = meet_at

    def start(self, rank: int, *flags: str, inside: list[str] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "kvrail.frontend.transfer_bench", "--rendezvous", self.meet_at]
        process = self.enter_context(
            subprocess.Popen(
                [*(inside or []), *command, "--rank", str(rank), *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        self.callback(process.kill)
        return process


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(f"127.0.0.1:{free_port()}") as started:
        yield started


def end(process: subprocess.Popen[str], timeout: float = 100) -> tuple[int, str]:
    """(status, all that it said)"""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out + err


def token_in(folder: Path) -> Path:
    """A file with a cluster token."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    return token


def check_records(records: list[dict[str, Any]], ways: set[tuple[str, str]]) -> None:
    assert {(record["lane"], record["transport"]) for record in records} == ways
    for record in records:
        assert record["verified"] is True
        # One way, as if there were one clock; and how exactly that is known.
        assert 0 < record["clock_us"] < 50_000
        assert -record["clock_us"] < record["median_us"] < 5e6


def test_one_command_a_host_and_two_clocks(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1's clock is a day ahead, where a time namespace can be had."""
    ahead = ["unshare", "--time", "--monotonic", str(DAY_S)]
    if subprocess.run([*ahead, "true"], capture_output=True, check=False).returncode:
        print("no time namespaces here: both ranks have one clock")
        ahead = []
    out = tmp_path / "records.json"
    receiver = ranks.start(1, inside=ahead)
    status, said = end(ranks.start(0, *SMALL, "--json", str(out)))
    assert status == 0, said
    assert end(receiver)[0] == 0
    ways = {("stream", "tcp"), ("put", "tcp"), ("socket", "tcp")}
    records = json.loads(out.read_text())
    check_records(records, ways)
    assert {record["pace"] for record in records} == {"", "paused", "tight"}
    for words in (
        "between two hosts",
        "put/tcp",
        "two clocks",
        "congestion control",
        "all pages arrived as they were sent",
    ):
        assert words in said


def test_between_two_network_namespaces(tmp_path: Path) -> None:
    out = tmp_path / "records.json"
    token = token_in(tmp_path)
    (tmp_path / "hidden").mkdir()
    with two_hosts() as hosts, Ranks(f"{hosts.first_kv}:7070") as ranks:
        flags = ["--token-file", str(token), "--no-latency", "--no-awake"]
        receiver = ranks.start(1, *flags, inside=hosts.inside(hosts.second, tmp_path / "hidden"))
        sender = ranks.start(
            0, *flags, *SMALL, "--json", str(out), inside=hosts.inside(hosts.first, tmp_path / "hidden")
        )
        status, said = end(sender)
        assert status == 0, said
        status, heard = end(receiver)
        assert status == 0
        assert f"receiving on {hosts.second_kv}" in heard
    check_records(json.loads(out.read_text()), {("stream", "tcp"), ("put", "tcp"), ("socket", "tcp")})


def test_over_ipv6() -> None:
    try:
        port = free_port("::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with Ranks(f"[::1]:{port}") as ranks:
        ranks.start(1)
        status, said = end(ranks.start(0, *SMALL, "--no-latency", "--no-awake"))
        assert status == 0, said
        assert "not measured" not in said


def test_over_link_local_ipv6(tmp_path: Path) -> None:
    """Control stream, lane stream and the socket take it; UCX takes another address of the same wire, or is refused."""
    out = tmp_path / "records.json"
    (tmp_path / "hidden").mkdir()
    with two_hosts() as hosts:
        for bare in (False, True):
            for name in (hosts.first, hosts.second) if bare else ():
                subprocess.run(
                    ["ip", "-n", name, "-4", "addr", "flush", "dev", "kv0"], check=True, capture_output=True
                )
            with Ranks(f"[{hosts.first_local}]:7070") as ranks:
                flags = [*SMALL, "--no-latency", "--no-awake", "--json", str(out)]
                receiver = ranks.start(1, inside=hosts.inside(hosts.second, tmp_path / "hidden"))
                sender = ranks.start(0, *flags, inside=hosts.inside(hosts.first, tmp_path / "hidden"))
                status, said = end(sender)
                assert status == (2 if bare else 0), said
                assert end(receiver)[0] == status
            if bare:
                assert "does not use IPv6 link-local addresses" in said
                launch = [sys.executable, "-P", "-m", "kvrail.frontend.cli", "launch", "--role", "pe"]
                launch += ["--model", str(tmp_path), "--token-file", str(token_in(tmp_path))]
                for host, word in (
                    (hosts.second_local, "UCX"),
                    ("kv0", "no IPv4 address"),
                    (hosts.second_local.partition("%")[0], "needs its interface"),
                ):
                    done = subprocess.run(
                        [*hosts.inside(hosts.second, tmp_path / "hidden"), *launch, "--kv-host", host],
                        capture_output=True,
                        text=True,
                        check=False,
                        timeout=60,
                    )
                    assert done.returncode == 2
                    assert f"--kv-host {host}" in done.stderr
                    assert word in done.stderr
            else:
                check_records(
                    json.loads(out.read_text()), {("stream", "tcp"), ("put", "tcp"), ("socket", "tcp")}
                )


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, ("rank 1 did not come to 127.0.0.1", "within 1 s", "--rank 1")),
        (1, ("rank 0 cannot be reached at 127.0.0.1", "Connection refused", "--rank 0")),
    ],
)
def test_the_other_one_does_not_come(ranks: Ranks, rank: int, words: tuple[str, ...]) -> None:
    status, said = end(ranks.start(rank, "--within", "1"))
    assert status == 2
    assert "Traceback" not in said
    for word in words:
        assert word in said


def test_a_place_where_nobody_can_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port in (("127.0.0.1", taken.getsockname()[1]), ("198.51.100.7", 7070)):
            with Ranks(f"{host}:{port}") as ranks:
                status, said = end(ranks.start(0))
                assert status == 2
                assert "rank 0 must listen on" in said


def test_wrong_flags_are_refused() -> None:
    for flags, word in (
        (["--rendezvous", "127.0.0.1:1"], "go together"),
        (["--kv-host", "127.0.0.1"], "are for --rendezvous"),
        (["--rendezvous", "127.0.0.1", "--rank", "0"], "HOST:PORT"),
        (["--rendezvous", "127.0.0.1:9", "--rank", "0", "--way", "shm"], "between two hosts one of"),
        (
            ["--rendezvous", "127.0.0.1:9", "--rank", "0", "--memory", "host->host", "--memory", "gpu->gpu"],
            "--memory gpu->gpu: between two hosts host->host only",
        ),
        (["--rendezvous", "127.0.0.1:9", "--rank", "0", "--within", "inf"], "--within"),
        (["--rendezvous", "127.0.0.1:9", "--rank", "1", "--token-file", "/no/file"], "cannot read"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvrail.frontend.transfer_bench", *flags],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert word in " ".join(done.stderr.replace("│", " ").split())
        assert "Traceback" not in done.stderr


def test_strangers_do_not_keep_the_other_rank_out(ranks: Ranks, tmp_path: Path) -> None:
    token = token_in(tmp_path)
    sender = ranks.start(0, *SMALL, "--no-latency", "--no-awake", "--token-file", str(token))
    address = ("127.0.0.1", int(ranks.meet_at.rpartition(":")[2]))
    deadline = time.monotonic() + 60
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"[" * 5000, b"[" * 3000 + b"\n", b'{"program": 1}\n', b""):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                sock = ranks.enter_context(socket.create_connection(address, timeout=10))
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with contextlib.suppress(OSError):
            sock.sendall(said)
    # Without the token: told on both sides.
    status, heard = end(ranks.start(1))
    assert status == 2
    assert "another token" in heard
    assert end(ranks.start(1, "--token-file", str(token)))[0] == 0
    status, told = end(sender)
    assert status == 0, told
    assert told.count("was sent away") == 6
    assert "no transfer-bench" in told
    assert "another token" in told


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_other_one_ends_in_the_middle(ranks: Ranks, dies: int, how: signal.Signals) -> None:
    both = [ranks.start(rank, *([*SMALL, "--rounds", "100000"] if rank == 0 else [])) for rank in (0, 1)]
    # What rank 1 says as soon as they have met.
    assert both[1].stdout is not None
    while "receiving on" not in both[1].stdout.readline():
        assert both[1].poll() is None
    time.sleep(3)
    both[dies].send_signal(how)
    status, said = end(both[1 - dies], timeout=60)
    assert status == 2, said
    assert f"rank {dies} " in said
    assert "Traceback" not in said
    if how == signal.SIGINT:
        assert "Traceback" not in end(both[dies])[1]


def test_two_of_one_rank(ranks: Ranks) -> None:
    sender = ranks.start(0, *SMALL, "--no-latency", "--no-awake")
    receivers = [ranks.start(1, "--within", "5") for _ in range(2)]
    assert end(sender)[0] == 0
    ends = [end(receiver) for receiver in receivers]
    assert sorted(status for status, _ in ends) == [0, 2]
    assert any("is another --rank 1 with it" in said or "cannot be reached" in said for _, said in ends)
