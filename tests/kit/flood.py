# SPDX-License-Identifier: Apache-2.0
"""A process of its own that opens many TCP connections within milliseconds, and holds them: strangers who say nothing.

argv: how many, then "at HOST PORT", or "of PID…" for every port on which one of these processes listens, as soon as it
does. A line is printed when the first have begun ("flood PORT"), and one when all have. It ends with its stdin.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["flooding", "listening_ports"]

_LISTEN = "0A"
_FIRST = 20


@contextlib.contextmanager
def flooding(count: int, *where: object) -> Iterator[subprocess.Popen[str]]:
    """Have it run; its lines are on stdout."""
    command = [sys.executable, "-P", __file__, str(count), *map(str, where)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def listening_ports(pid: int) -> set[tuple[str, int]]:
    """IPv4 addresses on which this process listens, and no other process of its network namespace."""
    ours = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            ours.add(os.readlink(fd))
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in ours:
            host, _, port = fields[1].partition(":")
            found.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def _flood(host: str, port: int, count: int, held: list[socket.socket]) -> None:
    for turn in range(count):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        failed = sock.connect_ex((host, port))
        held.append(sock)
        if failed not in (0, errno.EINPROGRESS):
            break  # Nobody listens any more.
        if turn == _FIRST:
            print("flood", port, flush=True)
    print("done", port, flush=True)


def _main() -> None:
    count, how, *where = sys.argv[1:]
    held: list[socket.socket] = []
    if how == "at":
        _flood(where[0], int(where[1]), int(count), held)
        sys.stdin.read()
        return
    over = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=watch, daemon=True).start()
    # What is there from the beginning is another matter.
    seen = {address for pid in where for address in listening_ports(int(pid))}
    print("watching", flush=True)
    while not over.is_set():
        for pid in where:
            with contextlib.suppress(OSError):
                for host, port in sorted(listening_ports(int(pid)) - seen):
                    seen.add((host, port))
                    _flood(host, port, int(count), held)
        time.sleep(0.001)


if __name__ == "__main__":
    _main()
