# SPDX-License-Identifier: Apache-2.0
"""Who holds the longest match, what is forgotten, and that a route follows it only while that pays."""

from __future__ import annotations

import pytest

from kvrail.runtime.control.prefix_directory import PrefixDirectory
from kvrail.runtime.control.routing import PeerView, RankView, choose

A, B, C = ((bytes([n]) * 16, 0) for n in range(3))


def keys(text: str) -> list[bytes]:
    """A key for each letter and all before it."""
    return [text[:n].encode() for n in range(1, len(text) + 1)]


def test_each_holder_with_its_longest_match() -> None:
    directory = PrefixDirectory()
    directory.note(keys("abcd"), A)
    directory.note(keys("abx"), B)
    assert directory.longest(keys("abcz")) == {A: 3, B: 2}
    assert directory.longest(keys("abx")) == {A: 2, B: 3}
    assert directory.longest(keys("zabc")) == directory.longest([]) == {}


def test_what_a_holder_has_lost_is_forgotten() -> None:
    directory = PrefixDirectory()
    for holder in (A, B):
        directory.note(keys("abcd"), holder)
    directory.correct(keys("abcd"), A, 1)
    assert directory.longest(keys("abcd")) == {A: 1, B: 4}
    directory.correct(keys("abcd"), B, 0)
    assert directory.longest(keys("abcd")) == {A: 1}


def test_the_oldest_goes_first_and_of_a_prefix_its_end() -> None:
    directory = PrefixDirectory(limit=5)
    directory.note(keys("abc"), A)
    directory.note(keys("xyz"), B)
    assert directory.longest(keys("abc")) == {A: 2}
    assert directory.longest(keys("xyz")) == {B: 3}
    directory.note(keys("a"), C)
    directory.note(keys("xyzuv"), B)
    assert directory.longest(keys("abc")) == {}
    assert directory.longest(keys("xyzuv")) == {B: 5}


@pytest.mark.parametrize(("load", "wanted"), [(0, "holder"), (4, "holder"), (5, "idle"), (9, "idle")])
def test_a_route_follows_the_match_unless_its_holder_is_far_busier(load: int, wanted: str) -> None:
    holder = PeerView(A, "http://a#0", "http://a", load, 10, held=7)
    less = PeerView(B, "http://b#0", "http://b", 0, 10, held=3)
    links = frozenset({A, B})
    route = choose(
        policy="prefix",
        affinity=b"conversation",
        ranks=[RankView(0, 0, 8, links, held=0), RankView(1, 1, 8, links, held=2)],
        peers=[less, holder],
        local_prefill="auto",
        short=False,
    )
    assert route is not None
    assert route.rank == 1
    assert route.peer == (holder if wanted == "holder" else less)


def test_without_any_match_the_idlest() -> None:
    busy, idle = PeerView(A, "a", "http://a", 2, 8), PeerView(B, "b", "http://b", 1, 8)
    route = choose(
        policy="prefix",
        affinity=b"x",
        ranks=[RankView(0, 0, 8, frozenset({A, B}))],
        peers=[busy, idle],
        local_prefill="auto",
        short=False,
    )
    assert route is not None
    assert route.peer == idle
