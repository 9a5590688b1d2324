# SPDX-License-Identifier: Apache-2.0
"""What a rank remembers of its links, and for how long: peers that were restarted must not pile up."""

from __future__ import annotations

from kvrail.runtime.link_board import MOST_ENDED, LinkBoard
from kvrail.runtime.messages import LinkReport
from kvrail.transfer.link_events import LaneInfo, LinkDown, LinkKey, LinkUp, PeerBeat
from kvrail.transfer.wire import Beat

LANE = LaneInfo(name="shm", transport="memfd", memory="4 KiB pages", fence="process", same_host=True)


def peer(number: int) -> LinkKey:
    return LinkKey(number.to_bytes(16, "big"), 0)


def test_peers_that_were_restarted_are_forgotten_in_time() -> None:
    sent: list[LinkReport] = []
    board = LinkBoard(sent.append)  # type: ignore[arg-type]
    lasting = peer(0)
    board.note(LinkUp(lasting, 1, LANE))
    for number in range(1, 1001):
        board.note(LinkUp(peer(number), 1, LANE))
        board.note(PeerBeat(peer(number), Beat(steps=number, state="serving", tickets=[])))
        board.count(peer(number), pages=1)
        board.note(LinkDown(peer(number), 1, "its process ended"))
    # What still comes of the forgotten ones changes nothing.
    board.count(peer(1), pages=1)
    assert board.up() == [lasting]
    assert [rank_peer for rank_peer, _, _ in board.counters()] == [
        key.incarnation.hex() for key in (lasting, *(peer(n) for n in range(1001 - MOST_ENDED, 1001)))
    ]
    assert all(len(table) <= MOST_ENDED + 1 for table in vars(board).values() if isinstance(table, dict))
    assert len(sent) == 2001


def test_a_link_that_comes_back_counts_on() -> None:
    board = LinkBoard(lambda message: None)
    board.note(LinkUp(peer(1), 1, LANE))
    board.count(peer(1), pages=2)
    board.note(LinkDown(peer(1), 1, "cut"))
    board.note(LinkUp(peer(1), 2, LANE))
    board.count(peer(1), pages=3)
    assert board.counters()[0][2]["pages"] == 5
