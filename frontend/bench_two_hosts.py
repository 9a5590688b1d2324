# SPDX-License-Identifier: Apache-2.0
"""`transfer-bench --rendezvous HOST:PORT --rank 0` sends and has the table; rank 1, on another host, receives.

Links, sockets and UCX listen on the addresses over which the two ranks have met, unless --kv-host names another.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvrail.frontend.bench_lines import Lines
from kvrail.frontend.bench_meeting import NO_TOKEN, meet
from kvrail.frontend.bench_peer import FarReceiver
from kvrail.frontend.bench_receiver import obey
from kvrail.runtime.control.auth import cluster_token
from kvrail.runtime.errors import ConfigError
from kvrail.transfer.errors import TransferError
from kvrail.transfer.rendezvous import rendezvous_address

__all__ = ["Rendezvous"]


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet, and how. `kv_host`: this rank's address on the network to measure (None: that by which
    they met). `token_file`: the same on both hosts (None: whoever comes first is let in). Raises TransferError.
    """

    address: str
    kv_host: str | None
    token_file: Path | None
    within_s: float
    say: Callable[[str], object]

    def sender(self) -> FarReceiver:
        """Rank 0: the other rank, as soon as it is there."""
        lines = self._met(0)
        return FarReceiver(lines, self.kv_host or _here(lines))

    def receive(self) -> None:
        """Rank 1: wait for rank 0, and do what it says until the end."""
        lines = self._met(1)
        with contextlib.closing(lines):
            host = self.kv_host or _here(lines)
            self.say(f"rank 1: receiving on {host} what rank 0 sends; the table is there")
            if not obey(lines, host, far=True):
                raise TransferError("rank 0 has ended before all was measured: see what it says")
        self.say("rank 1: rank 0 has measured everything")

    def _met(self, rank: int) -> Lines:
        try:
            host, port = rendezvous_address(self.address)
            token = NO_TOKEN if self.token_file is None else cluster_token(str(self.token_file), Path())
        except ValueError as error:
            raise TransferError(f"--rendezvous {error}") from None
        except ConfigError as error:
            raise TransferError(f"--token-file: {error}") from None
        # Why a lane is not a faster one: here no way could be.
        logging.getLogger("kvrail.transfer.links").setLevel(logging.ERROR)
        other = 1 - rank
        self.say(
            f"rank {rank}: waiting for rank {other} at {host} port {port}, for up to {self.within_s:g} s"
        )
        return meet(host, port, rank, token=token, within_s=self.within_s, say=self.say)


def _here(lines: Lines) -> str:
    """The address by which the other rank is reached."""
    return str(socket.getnameinfo(lines.socket.getsockname(), socket.NI_NUMERICHOST)[0])
