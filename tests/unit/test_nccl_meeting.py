# SPDX-License-Identifier: Apache-2.0
"""Two ranks of the NCCL probe meet, or say in one line why not; none of it needs a GPU."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from kvrail.frontend.doctor_nccl import examine_nccl
from kvrail.transfer.errors import TransferError
from kvrail.transfer.nccl_meeting import meet
from kvrail.transfer.rendezvous import rendezvous_address

FACTS = {"NCCL": "2.28.9"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Ranks:
    """Several ranks at once, each on a thread."""

    def __init__(self, *ranks: tuple[int, dict[str, str]], within_s: float = 20.0) -> None:
        self.port = free_port()
        self.errors: list[str] = []
        self.stores: list[object] = []
        threads = [threading.Thread(target=self._run, args=(*rank, within_s)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, rank: int, facts: dict[str, str], within_s: float) -> None:
        try:
            self.stores.append(meet("127.0.0.1", self.port, rank=rank, within_s=within_s, facts=facts))
        except TransferError as error:
            self.errors.append(str(error))


def test_both_there() -> None:
    ranks = Ranks((0, FACTS), (1, FACTS))
    assert ranks.errors == []
    assert len(ranks.stores) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_one_side_missing(rank: int) -> None:
    begun = time.monotonic()
    (error,) = Ranks((rank, FACTS), within_s=1.0).errors
    assert f"rank {1 - rank} did not come to 127.0.0.1:" in error
    assert f"--rank {1 - rank}" in error
    assert "\n" not in error
    assert time.monotonic() - begun < 20


def test_different_versions_are_told_on_both_sides() -> None:
    errors = sorted(Ranks((0, FACTS), (1, {"NCCL": "2.26.2"})).errors)
    assert errors == [
        "NCCL is 2.26.2 here and 2.28.9 at rank 0: install the same on both hosts",
        "NCCL is 2.28.9 here and 2.26.2 at rank 1: install the same on both hosts",
    ]


def test_a_rank_that_came_twice_is_told() -> None:
    ranks = Ranks((0, FACTS), (1, FACTS), (1, FACTS))
    assert ranks.errors == ["there are two of --rank 1: give one of them --rank 0"]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TransferError, match=f"port {port} cannot be listened on"):
            meet("127.0.0.1", port, rank=0, within_s=5, facts=FACTS)


def test_addresses() -> None:
    assert rendezvous_address("h:1") == ("h", 1)
    assert rendezvous_address("[::1]:5000") == ("::1", 5000)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hello", "HOST:PORT"),
        (":5000", "HOST:PORT"),
        ("::1:5000", "[ADDRESS]:PORT"),
        ("127.0.0.1:0", "1 to 65535"),
        ("127.0.0.1:http", "1 to 65535"),
        # Nets and names for documentation: no machine has them.
        ("198.51.100.7:5000", "rank 0 must listen there"),
        ("no-host.invalid:5000", "no-host.invalid:5000: "),
    ],
)
def test_addresses_that_cannot_be_met_at(address: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        examine_nccl(rendezvous=address, rank=0, json_file=None)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("runtime doctor: --rendezvous")
    assert said in line
