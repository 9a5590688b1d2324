# SPDX-License-Identifier: Apache-2.0
"""What a rank remembers of its links, and for how long: peers that were restarted must not pile up."""

from __future__ import annotations

import pytest

from kvrail.runtime.link_board import MOST_ENDED, LinkBoard
from kvrail.runtime.messages import LinkReport, ToFront
from kvrail.transfer.link_events import (
    LaneInfo,
    LinkDown,
    LinkKey,
    LinkRefusal,
    LinkUp,
    PeerBeat,
    PeerStuck,
    Recovered,
    Suspect,
)
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
    assert all(
        len(table) <= MOST_ENDED + 1 for table in vars(board).values() if isinstance(table, dict | set)
    )
    assert len(sent) == 2001


def test_a_link_that_comes_back_counts_on() -> None:
    board = LinkBoard(lambda message: None)
    board.note(LinkUp(peer(1), 1, LANE))
    board.count(peer(1), pages=2)
    board.note(LinkDown(peer(1), 1, "cut"))
    board.note(LinkUp(peer(1), 2, LANE))
    board.count(peer(1), pages=3)
    assert board.counters()[0][2]["pages"] == 5


@pytest.mark.parametrize("stage", ["connecting", "up", "suspect", "down"])
@pytest.mark.parametrize("end", ["told", "never"])
def test_nothing_is_kept_of_peers_that_the_front_has_dropped(stage: str, end: str) -> None:
    """A prefill engine that is restarted is another peer each time; the old one's link may have been anything."""
    sent: list[ToFront] = []
    board = LinkBoard(sent.append)
    for number in range(1000):
        key = peer(number)
        board.connecting(key)
        if stage != "connecting":
            board.note(LinkUp(key, 1, LANE))
            board.note(PeerBeat(key, Beat(steps=number, state="serving", tickets=[])))
            board.count(key, pages=1)
        if stage == "suspect":
            board.note(Suspect(key))
            board.note(PeerStuck(key, 3.0))
        if stage == "down":
            board.note(LinkDown(key, 1, "its process ended"))
        board.drop(key)
        told = len(sent)
        if end == "told":
            board.note(PeerBeat(key, Beat(steps=number + 1, state="serving", tickets=[])))
            board.note(Recovered(key))
            board.note(LinkDown(key, 1, "that prefill rank is gone"))
        assert len(sent) == told, "news for nobody"
    assert not any(table for table in vars(board).values() if isinstance(table, dict | set))


def test_a_link_that_was_dropped_may_be_made_again() -> None:
    sent: list[ToFront] = []
    board = LinkBoard(sent.append)
    for epoch in (1, 2):
        board.connecting(peer(1))
        board.note(LinkUp(peer(1), epoch, LANE))
        board.drop(peer(1))
        board.note(LinkDown(peer(1), epoch, "dropped"))
    assert [getattr(one, "state", "dropped") for one in sent] == ["connecting", "up", "dropped"] * 2
    assert board.up() == []
    board.note(LinkRefusal(peer(2), "another layout"))
    assert board.reports[peer(2)].reason == "another layout", "of a peer that dialed us nobody knew before"
