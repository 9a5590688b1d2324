# SPDX-License-Identifier: Apache-2.0
"""Routes: conversations stay where they are, a lost rank moves only its own, and nothing goes where no link is up."""

from __future__ import annotations

from typing import Any

import pytest

from kvrail.runtime.control.routing import (
    PeerView,
    RankView,
    Route,
    affinity_key,
    another,
    choose,
    rendezvous,
)
from kvrail.runtime.errors import Unavailable

KEYS = [affinity_key(f"conversation {n}") for n in range(300)]


def peer(number: int, load: int = 0, limit: int = 4) -> PeerView:
    return PeerView((bytes([number]) * 16, 0), f"http://pe{number}#0", f"http://pe{number}", load, limit)


def route(ranks: list[RankView], peers: list[PeerView] | None = None, **changes: Any) -> Route | None:
    settings: dict[str, Any] = {
        "policy": "affinity",
        "affinity": KEYS[0],
        "local_prefill": "auto",
        "short": False,
        **changes,
    }
    return choose(ranks=ranks, peers=peers or [], **settings)


def linked(rank: int, *peers: PeerView, load: int = 0, limit: int = 4) -> RankView:
    return RankView(rank, load, limit, frozenset(p.key for p in peers))


def test_a_lost_rank_moves_only_its_own() -> None:
    names = ["a", "b", "c", "d"]
    before = {key: names[rendezvous(key, names)[0]] for key in KEYS}
    left = ["a", "b", "d"]
    for key, name in before.items():
        if name != "c":
            assert left[rendezvous(key, left)[0]] == name
    assert {name for key, name in before.items()} == set(names)


def test_the_order_of_names_makes_no_difference() -> None:
    for key in KEYS:
        assert "abc"[rendezvous(key, list("abc"))[0]] == "cab"[rendezvous(key, list("cab"))[0]]


def test_affinity_overflows_to_the_next_in_order() -> None:
    a, b = peer(1), peer(2)
    first = route([linked(0, a, b)], [a, b])
    assert first is not None
    assert first.peer is not None
    full = [p._replace(load=4) if p.key == first.peer.key else p for p in (a, b)]
    second = route([linked(0, a, b)], full)
    assert second is not None
    assert second.peer is not None
    assert second.peer.key != first.peer.key


def test_least_loaded() -> None:
    a, b = peer(1, load=3), peer(2, load=1)
    for key in KEYS[:20]:
        chosen = route(
            [linked(0, a, b, load=2), linked(1, a, b)], [a, b], policy="least-loaded", affinity=key
        )
        assert chosen == Route(1, b)


def test_only_links_that_are_up_carry_prompts() -> None:
    a, b = peer(1), peer(2)
    for key in KEYS[:20]:
        assert route([linked(0), linked(1, b)], [a, b], affinity=key) == Route(1, b)


@pytest.mark.parametrize(
    ("local_prefill", "short", "up", "wanted"),
    [
        ("auto", False, True, "remote"),
        ("auto", True, True, "local"),
        ("auto", False, False, "local"),
        ("always", False, True, "local"),
        ("never", True, True, "remote"),
        ("never", False, False, "refused"),
    ],
)
def test_where_the_prompt_is_prefilled(local_prefill: str, short: bool, up: bool, wanted: str) -> None:
    a = peer(1)
    ranks = [linked(0, a) if up else linked(0)]
    if wanted == "refused":
        with pytest.raises(Unavailable, match="no prefill engine"):
            route(ranks, [a], local_prefill=local_prefill, short=short)
        return
    chosen = route(ranks, [a], local_prefill=local_prefill, short=short)
    assert chosen == Route(0, a if wanted == "remote" else None)


def test_a_silent_peer_is_waited_for_only_where_nothing_else_can_serve() -> None:
    a, b = peer(1), peer(2)
    silent = RankView(0, 0, 4, links_silent=frozenset({a.key}))
    assert route([silent], [a], local_prefill="never") is None
    assert route([silent], [a]) == Route(0, None)
    assert route([silent, linked(1, b)], [a, b], local_prefill="never") == Route(1, b)
    with pytest.raises(Unavailable, match="no prefill engine"):
        route([silent], [b], local_prefill="never")


def test_full_means_wait_and_none_means_refuse() -> None:
    assert route([RankView(0, 4, 4)]) is None
    a = peer(1, load=4)
    assert route([linked(0, a)], [a]) is None
    with pytest.raises(Unavailable, match="no rank is ready"):
        route([])


def test_a_rank_whose_peers_are_full_does_not_hide_another() -> None:
    full, free = peer(1, load=4), peer(2)
    for key in KEYS[:20]:
        assert route([linked(0, full), linked(1, free)], [full, free], affinity=key) == Route(1, free)


@pytest.mark.parametrize("policy", ["affinity", "least-loaded", "prefix"])
def test_another_peer_is_one_of_another_engine_with_room(policy: Any) -> None:
    lost = peer(1)
    sibling = lost._replace(key=(bytes([1]) * 16, 1), name="http://pe1#1")
    full, free, idle = peer(2, load=4), peer(3, load=2), peer(4)

    def choice(*others: PeerView, full: bool = False, key: bytes = KEYS[0]) -> PeerView | None:
        return another(policy=policy, affinity=key, others=others, lost=lost, full=full)

    for key in KEYS[:20]:
        assert choice(sibling, full, free, key=key) == free, "what ended one rank may have ended its engine"
    assert choice(sibling, full) == sibling
    assert choice(full) is None
    assert choice(full, peer(5, load=9), full=True) == full
    assert choice(full=True) is None
    if policy != "affinity":
        assert choice(free, idle) == idle
