# SPDX-License-Identifier: Apache-2.0
"""What a rank remembers of its links: peers that restart for days leave no trail that only grows."""

from __future__ import annotations

from typing import Any

from kvrail.runtime.link_board import LinkBoard
from kvrail.transfer.link_events import LaneInfo, LinkDown, LinkKey, LinkUp, PeerBeat
from kvrail.transfer.wire import Beat

LANE = LaneInfo("put", "tcp", "host", "worker")


def key(number: int) -> LinkKey:
    return LinkKey(number.to_bytes(16, "big"), 0)


def test_restarted_peers_do_not_pile_up() -> None:
    sent: list[Any] = []
    board = LinkBoard(sent.append)
    board.note(LinkUp(key(0), 1, LANE))
    for number in range(1, 200):
        board.note(LinkUp(key(number), 1, LANE))
        board.note(PeerBeat(key(number), Beat(steps=1, state="serving")))
        board.count(key(number), pages=3)
        board.note(LinkDown(key(number), 1, "gone"))
    assert board.up() == [key(0)]
    counters = board.counters()
    assert len(counters) == 65
    assert counters[-1] == (key(199).incarnation.hex(), 0, {"pages": 3, "bytes": 0, "tickets": 0})
    assert (sent[-1].state, sent[-1].lane) == ("down", "put")


def test_what_comes_late_for_a_dropped_link_is_not_counted() -> None:
    board = LinkBoard([].append)
    board.note(LinkUp(key(1), 1, LANE))
    board.drop(key(1))
    board.count(key(1), pages=1)
    board.note(LinkDown(key(1), 1, "gone"))
    assert board.counters() == []
