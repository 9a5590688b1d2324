# SPDX-License-Identifier: Apache-2.0
"""Stop strings: the same answer however the text is cut into pieces, and nothing of a match ever let out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrail.frontend.stop import StopMatcher


def emitted(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = [matcher.feed(piece) for piece in pieces]
    return [*out, "" if matcher.matched else matcher.flush()], matcher.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "wanted", "matched"),
    [
        (["END"], ["a E", "N", "D tail"], ["a ", "", "", ""], "END"),
        (["END"], ["a E", "N", "X"], ["a ", "", "ENX", ""], None),
        (["END"], ["a EN"], ["a ", "EN"], None),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ["one", "\ntwo", "", ""], "\n\n"),
        (["aab"], ["aa", "a", "b"], ["", "a", "", ""], "aab"),
        ([], ["any", "thing"], ["any", "thing", ""], None),
    ],
)
def test_hold_back(stops: list[str], pieces: list[str], wanted: list[str], matched: str | None) -> None:
    assert emitted(stops, pieces) == (wanted, matched)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert [matcher.feed("ax"), matcher.feed("b")] == ["a", ""]


texts = st.text(alphabet="ab", max_size=12)


@given(
    text=texts,
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=5),
)
def test_cuts_make_no_difference(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    by_char, matched = emitted(stops, list(text))
    by_piece, matched_by_piece = emitted(stops, pieces)
    assert "".join(by_piece) == "".join(by_char)
    assert matched_by_piece == matched
    if matched is None:
        assert "".join(by_char) == text
    assert all(stop not in "".join(by_char) for stop in stops)
