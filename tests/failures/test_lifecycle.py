# SPDX-License-Identifier: Apache-2.0
"""Roles come up in any order and go within five seconds, however they are told to; nothing of them is left.

What could be left: processes, sockets, shared memory, and clients that wait for an end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kit.asking import Asking, ask, make_prompt
from kit.breakable import COMMON, wait_idle
from kit.cluster import Server, serving, wait_until
from kit.shm import segments
from kit.slow_model import write_slow_model

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

WITHIN_S = 5.0
# A prompt that is computed in one step of seconds, and the pool that holds it.
LONGEST = 1700
POOL = ("--kv-pages", "128")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lifecycle")
    write_slow_model(folder / "model")
    return folder


@pytest.fixture
def start(folder: Path) -> Iterator[object]:
    """start(role, *flags): a server that does not outlive the test."""
    with contextlib.ExitStack() as stack:

        def start(role: str, *flags: str, port: int | None = None) -> Server:
            if role == "ce":
                flags += ("--link-share", "0.9")
            server = Server(role, folder / "model", folder, *COMMON, *POOL, *flags, port=port)
            stack.enter_context(serving(server))
            return server

        yield start


class Traces:
    """What a role has on this machine while it runs, to be looked for when it is gone."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pids = server.pids()
        assert len(self.pids) >= 2, "a front and a rank"
        self.folders = list((server.log.parent / "run").glob(f"{server.role}-{server.process.pid}-*.run"))
        assert self.folders
        self._shm = set[str]().union(*map(segments, self.pids))

    def alive(self) -> list[int]:
        found = []
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    def check_gone(self, since: float) -> None:
        """Every process within the time from `since`; then nothing may be left in memory, and the port is free."""
        self.server.process.wait(WITHIN_S)
        wait_until(lambda: not self.alive(), max(0.1, since + WITHIN_S - time.monotonic()), "all are gone")
        left = {name for name in self._shm if (Path("/dev/shm") / name).exists()}
        assert not left, f"in /dev/shm: {left}"
        segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
        assert not [row for row in segments if int(row[4]) in self.pids], "SysV segments are left"
        with socket.create_server(("127.0.0.1", self.server.port)):
            pass


def test_ce_before_pe_then_orderly_stops(start, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """The PE comes later; both listen on loopback only; SIGTERM and SIGINT end them with streams under way."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ce = start("ce", "--pe-url", f"http://127.0.0.1:{port}", "--lane", "put").wait_ready()
    early = ask(ce, make_prompt(30))
    whole = (early.status, early.route, early.error, len(early.tokens)) == (200, "local", "", 6)
    assert whole, f"{early.summary}\n{ce.tail()}"
    pe = start("pe", "--max-num-batched-tokens", "2048", port=port).wait_ready()
    wait_until(lambda: ce.metric("kvrail_link_up") == 1, 40, "the link is up", ce, pe)
    late = ask(ce, early.prompt)
    assert (late.status, late.route, late.tokens) == (200, "remote", early.tokens), late.summary
    wait_idle(ce, pe)
    check_listeners(ce, pe)

    # Ctrl-C reaches the whole group of the PE, while its rank is in the middle of one long step.
    traces = Traces(pe)
    long = Asking(ce, make_prompt(LONGEST))
    wait_until(lambda: ce.metric("kvrail_tickets") == 1, 20, "the prompt is at the PE", ce, pe)
    started = time.monotonic()
    os.killpg(pe.process.pid, signal.SIGINT)
    traces.check_gone(started)
    assert pe.process.returncode == 0
    assert not any(path.exists() for path in traces.folders)

    # SIGTERM to the CE's front, while its rank prefills that prompt in one step; its client is told why it ends.
    traces = Traces(ce)
    if long.ended:  # The PE was fast enough to land it.
        long = Asking(ce, make_prompt(LONGEST))
    wait_until(lambda: ce.metric("kvrail_rank_requests") == 1, 20, "the prompt is at the CE's rank", ce)
    started = time.monotonic()
    ce.process.terminate()
    traces.check_gone(started)
    assert ce.process.returncode == 0
    assert not any(path.exists() for path in traces.folders)
    long.wait(WITHIN_S)
    assert not long.torn, long.summary
    assert long.tokens or (long.status == 503 and "stopping" in long.error), long.summary


def check_listeners(*servers: Server) -> None:
    """Only loopback, only --host and --kv-host; Unix sockets only in the private folder."""
    seen = 0
    for server in servers:
        for pid in server.pids():
            for found in psutil.Process(pid).net_connections("inet"):
                if found.status == psutil.CONN_LISTEN or found.type == socket.SOCK_DGRAM:
                    assert found.laddr.ip == "127.0.0.1", found
                    seen += 1
            for found in psutil.Process(pid).net_connections("unix"):
                # UCX wakes its peers on this host by empty datagrams at abstract addresses; nothing can be asked there.
                if found.laddr and found.type == socket.SOCK_STREAM:
                    assert str(found.laddr).startswith(str(server.log.parent / "run")), found
    # Both fronts, and at least the PE rank's control port.
    assert seen >= 3


def test_front_killed_and_rank_killed(start, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """A front that is killed takes its ranks along; a rank that is killed ends its role with status 1."""
    first = start("single").wait_ready()
    traces = Traces(first)
    streaming = Asking(first, make_prompt(50), max_tokens=1900)
    assert streaming.first_token.wait(30)
    started = time.monotonic()
    os.kill(first.process.pid, signal.SIGKILL)
    assert streaming.wait(WITHIN_S).torn
    traces.check_gone(started)

    second = start("single", port=first.port).wait_ready()
    assert not any(path.exists() for path in traces.folders), "the next start clears the dead role's folder"
    traces = Traces(second)
    streaming = Asking(second, make_prompt(50), max_tokens=1900)
    assert streaming.first_token.wait(30)
    started = time.monotonic()
    os.kill(second.ranks()[0], signal.SIGKILL)
    streaming.wait(WITHIN_S)
    assert not streaming.torn, streaming.summary
    assert streaming.error
    traces.check_gone(started)
    assert second.process.returncode == 1
    assert second.logged("rank 0 ended with exit status -9")
    assert not any(path.exists() for path in traces.folders)


def test_stopped_while_streaming_and_while_loading(start, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """SIGTERM: a stream ends with an error event within the grace; a role that still loads just goes."""
    server = start("single").wait_ready()
    traces = Traces(server)
    streaming = Asking(server, make_prompt(50), max_tokens=1900)
    assert streaming.first_token.wait(30)
    loading = start("single")
    wait_until(lambda: len(loading.pids()) == 2, 30, "its rank has been started", loading)
    both = [(traces, time.monotonic()), (Traces(loading), time.monotonic())]
    for each, _ in both:
        each.server.process.terminate()
    streaming.wait(WITHIN_S)
    assert not streaming.torn, streaming.summary
    assert "stopping" in streaming.error
    for each, started in both:
        each.check_gone(started)
        assert each.server.process.returncode == 0, each.server.tail()
        assert not any(path.exists() for path in each.folders)


@pytest.mark.parametrize("loading", [False, True])
def test_a_stop_that_reaches_the_whole_group_is_no_alarm(  # type: ignore[no-untyped-def]
    start, loading: bool
) -> None:
    """As systemd stops a service: the ranks hear of it from elsewhere, and are gone before the front has stopped."""
    server = start("single")
    if loading:
        wait_until(lambda: len(server.pids()) == 2, 30, "its rank has been started", server)
    else:
        server.wait_ready()
    traces = Traces(server)
    since = time.monotonic()
    os.killpg(server.process.pid, signal.SIGTERM)
    traces.check_gone(since)
    assert server.process.returncode == 0, server.tail()
    assert " WARNING " not in server.tail()
    assert " ERROR " not in server.tail()


def test_a_test_run_that_is_killed_leaves_no_role_behind(folder: Path) -> None:
    """Whoever started it cannot stop it any more."""
    run = (
        "import sys, time; from pathlib import Path; from kit.cluster import Server; "
        "server = Server('single', Path(sys.argv[1]) / 'model', Path(sys.argv[1])); "
        "print(server.process.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-P", "-c", run, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        front = psutil.Process(int(tests.stdout.readline()))
        try:
            wait_until(lambda: bool(front.children()), 60, "it has started its rank")
            role = [front, *front.children(recursive=True)]
            tests.kill()
            _, alive = psutil.wait_procs(role, timeout=20)
            assert not alive
        finally:
            tests.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(front.pid, signal.SIGKILL)
