# SPDX-License-Identifier: Apache-2.0
"""The two ranks of transfer-bench meet whatever the network makes of their lines."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from kvrail.frontend.bench_meeting import NO_TOKEN, meet


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def late_network(port: int) -> Iterator[int]:
    """A way to `port` by which bytes come a moment late, and so together. Gives the port at its beginning."""

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(0.2)
                with contextlib.suppress(BlockingIOError):
                    data += source.recv(1 << 16, socket.MSG_DONTWAIT)
                target.sendall(data)

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            with contextlib.suppress(OSError):
                ours = stack.enter_context(listener.accept()[0])
                theirs = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                for pair in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])


def test_a_command_that_comes_with_the_last_word_of_the_meeting_is_heard() -> None:
    port = free_port()

    def say(_: str) -> None:
        pass

    def first() -> None:
        with contextlib.closing(meet("127.0.0.1", port, 0, token=NO_TOKEN, within_s=20, say=say)) as lines:
            lines.allow(20)
            lines.tell(do="open")
            assert lines.hear() == {"ways": {}}

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(first)
        # (Dialing would be refused without rank 0, and try again.)
        time.sleep(0.2)
        with late_network(port) as way:
            lines = meet("127.0.0.1", way, 1, token=NO_TOKEN, within_s=20, say=say)
            with contextlib.closing(lines):
                lines.allow(5)
                assert lines.hear() == {"do": "open"}
                lines.tell(ways={})
                done.result(20)
