# SPDX-License-Identifier: Apache-2.0
"""Pages have one owner, counts add up under any order of calls, and allocations come in long runs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.transfer.errors import NoPages
from kvrail.transfer.pages import PagePool


def runs(pages: list[int]) -> int:
    return 1 + int((np.diff(pages) != 1).sum())


def keys(count: int) -> list[bytes]:
    return [b"key%d" % i for i in range(count)]


def test_allocation_is_one_ascending_run_while_there_is_one() -> None:
    pool = PagePool(64)
    assert pool.allocate("a", 10) == list(range(10))
    assert pool.allocate("b", 5) == list(range(10, 15))
    pool.release("a")
    assert pool.allocate("c", 10) == list(range(10)), "the shortest run that is long enough"
    assert pool.allocate("b", 3) == [15, 16, 17], "growth goes on behind the last page"
    pool.check()


def test_a_broken_pool_gives_the_longest_runs() -> None:
    pool = PagePool(40)
    for i in range(40):
        pool.allocate(str(i), 1)
    for page in [0, 2, 3, 4, 10, 11, 20, 21, 22, 23, 24, 39]:
        pool.release(str(page))
    assert pool.allocate("wide", 9) == [0, 2, 3, 4, 20, 21, 22, 23, 24]
    assert pool.allocate("rest", 3) == [10, 11, 39]
    assert pool.free == 0
    pool.check()


def test_no_pages_changes_nothing() -> None:
    pool = PagePool(8)
    pool.allocate("a", 6)
    with pytest.raises(NoPages, match="3 pages asked for, 2 of 8"):
        pool.allocate("b", 3)
    assert (pool.free, pool.owned, pool.owners()) == (2, 6, ["a"])
    assert pool.allocate("b", 0) == []
    pool.check()


def test_the_growth_reserve_is_kept_from_tickets_only() -> None:
    pool = PagePool(10, growth_reserve=4)
    with pytest.raises(NoPages, match="kept for running sequences"):
        pool.allocate("ticket", 7, keep_reserve=True)
    pool.allocate("ticket", 6, keep_reserve=True)
    with pytest.raises(NoPages):
        pool.allocate("ticket2", 1, keep_reserve=True)
    pool.allocate("sequence", 4)
    assert pool.available == 0


def test_release_is_idempotent_and_a_page_never_has_two_owners() -> None:
    pool = PagePool(8)
    pool.allocate("a", 4)
    pool.release("a")
    pool.release("a")
    pool.release("never seen")
    assert pool.free == 8
    pool.allocate("a", 2)
    pool.allocate("b", 2)
    with pytest.raises(ValueError, match="does not hold page 0"):
        pool.release_pages("b", [0])
    pool.release_pages("a", [0])
    assert pool.pages_of("a") == [1]
    pool.check()


def test_check_sees_a_page_in_two_hands() -> None:
    pool = PagePool(8)
    pool.allocate("a", 2)
    pool.allocate("b", 2)
    pool._held["b"].pages[0] = None
    with pytest.raises(AssertionError, match="two hands"):
        pool.check()
    pool.release("a")
    with pytest.raises(AssertionError, match="not owned"):
        pool.release("b")


def test_quarantine_holds_pages_until_proof() -> None:
    pool = PagePool(8, state_slots=2)
    pool.allocate("ticket", 3)
    slot = pool.allocate_state("ticket")
    pool.quarantine("ticket")
    pool.quarantine("ticket")
    pool.release("ticket")
    assert (pool.free, pool.owned, pool.quarantined, pool.free_states) == (5, 0, 3, 1)
    assert pool.quarantined_of("ticket") == [0, 1, 2]
    with pytest.raises(NoPages):
        pool.allocate("other", 6)
    pool.check()
    pool.release_quarantined("ticket")
    pool.release_quarantined("ticket")
    assert (pool.free, pool.quarantined, pool.free_states) == (8, 0, 2)
    assert pool.allocate_state("other") == slot
    pool.check()


def test_rename_gives_a_tickets_pages_to_a_sequence() -> None:
    pool = PagePool(16, state_slots=1)
    pool.allocate("seed", 1)
    pool.share("seed", [0], [b"k"])
    pool.match("sequence", [b"k"])
    pool.allocate("ticket", 3)
    pool.allocate_state("ticket")
    pool.rename("ticket", "sequence")
    pool.rename("ticket", "sequence")
    assert pool.pages_of("sequence") == [1, 2, 3]
    assert pool.state_slot_of("sequence") == 0
    pool.release("seed")
    assert pool.shared == 1, "the pin of the sequence is still there"
    pool.release("sequence")
    assert (pool.free, pool.cached, pool.free_states) == (15, 1, 1)
    pool.check()


def test_state_slots_may_be_none_and_are_never_given_twice() -> None:
    assert PagePool(4).allocate_state("a") == -1
    pool = PagePool(4, state_slots=2)
    assert {pool.allocate_state("a"), pool.allocate_state("b")} == {0, 1}
    with pytest.raises(NoPages, match="state slots"):
        pool.allocate_state("c")
    pool.release("a")
    pool.allocate_state("c")
    with pytest.raises(ValueError, match="a state slot each"):
        pool.rename("b", "c")
    pool.check()


def test_a_match_is_the_longest_prefix_and_pins() -> None:
    pool = PagePool(8)
    pages = pool.allocate("a", 4)
    for page, key in zip(pages, keys(4), strict=True):
        pool.share("a", [page], [key])
    assert pool.pages_of("a") == []
    assert pool.match("b", [*keys(3), b"other"]) == pages[:3]
    assert pool.match("c", [b"other", *keys(3)]) == []
    pool.release("a")
    assert (pool.shared, pool.cached) == (3, 1)
    with pytest.raises(NoPages):
        pool.allocate("d", 6)
    pool.allocate("d", 5)
    assert pool.cached == 0, "the unread page was evicted, the pinned ones were not"
    assert pool.match("e", keys(4)) == pages[:3]
    pool.check()


def test_the_end_of_the_oldest_prefix_is_evicted_first() -> None:
    pool = PagePool(8)
    for name in ("old", "new"):
        for i, page in enumerate(pool.allocate(name, 4)):
            pool.share(name, [page], [b"%s%d" % (name.encode(), i)])
    pool.release("old")
    pool.release("new")
    pool.allocate("x", 2)
    assert len(pool.match("m", [b"old%d" % i for i in range(4)])) == 2
    assert len(pool.match("m", [b"new%d" % i for i in range(4)])) == 4
    pool.release("m")
    pool.allocate("y", 5)
    pool.release("y")
    assert pool.match("m", [b"old0", b"old1"]) == [] or pool.match("m", [b"new0"]) == []
    pool.check()


def test_a_key_that_exists_leaves_the_second_page_private() -> None:
    pool = PagePool(8)
    (first,) = pool.allocate("a", 1)
    (second,) = pool.allocate("b", 1)
    pool.share("a", [first], [b"k"])
    pool.share("b", [second], [b"k"])
    assert pool.pages_of("b") == [second]
    assert pool.match("c", [b"k"]) == [first]
    with pytest.raises(ValueError, match="does not write"):
        pool.share("c", [first], [b"other"])
    pool.release("b")
    assert pool.free == 7
    pool.check()


def test_pages_that_are_shared_together() -> None:
    pool = PagePool(8)
    pool.share("first", pool.allocate("first", 1), [b"2"])
    pages = pool.allocate("a", 4)
    with pytest.raises(ValueError, match="does not write page 7"):
        pool.share("a", [*pages[:2], 7], [b"1", b"2", b"3"])
    pool.check()
    assert (pool.pages_of("a"), pool.shared) == (pages, 1)
    # The second stands under its key elsewhere, the fourth repeats one: these two stay private.
    pool.share("a", pages, [b"1", b"2", b"3", b"3"])
    assert (pool.pages_of("a"), pool.reads_of("a")) == ([pages[1], pages[3]], [pages[0], pages[2]])
    assert pool.match("b", [b"1", b"3"]) == [pages[0], pages[2]]
    pool.check()
    pool.release("a")
    pool.release("b")
    assert (pool.owned, pool.shared, pool.cached) == (0, 1, 2)
    pool.check()


def test_a_shared_page_is_released_by_its_reader_count() -> None:
    pool = PagePool(4)
    (page,) = pool.allocate("a", 1)
    pool.share("a", [page], [b"k"])
    pool.match("b", [b"k"])
    pool.release_pages("a", [page])
    assert pool.shared == 1
    pool.release_pages("b", [page])
    assert (pool.shared, pool.cached) == (0, 1)
    assert pool.flush_cache() == 1
    assert pool.flush_cache() == 0
    assert (pool.free, pool.owners()) == (4, [])
    pool.check()


def test_forked_pages_are_freed_once_with_their_last_reader() -> None:
    pool = PagePool(6)
    one, two, three = pool.allocate("a", 3)
    pool.share("a", [one], [b"k"])
    pool.fork("a", "b", [one, two])
    pool.fork("a", "c", [one, two])
    # What two may read, nobody writes.
    assert (pool.pages_of("a"), pool.shared, pool.owned) == ([three], 2, 1)
    with pytest.raises(ValueError, match="does not write"):
        pool.share("a", [two], [b"l"])
    with pytest.raises(ValueError, match="does not hold page"):
        pool.fork("b", "d", [one, three])
    pool.release("a")
    pool.release("b")
    pool.check()
    assert (pool.shared, pool.free) == (2, 4)
    pool.release("c")
    pool.check()
    # The one that has a name stays for a later match.
    assert (pool.shared, pool.cached, pool.free) == (0, 1, 5)
    assert pool.match("d", [b"k"]) == [one]


def test_quarantine_drops_pins_of_shared_pages() -> None:
    pool = PagePool(4)
    (page,) = pool.allocate("a", 1)
    pool.share("a", [page], [b"k"])
    pool.match("ticket", [b"k"])
    pool.allocate("ticket", 1)
    pool.quarantine("ticket")
    pool.release("a")
    assert (pool.cached, pool.quarantined) == (1, 1)
    pool.check()


def test_large_allocations_are_fast() -> None:
    pool = PagePool(100_000)
    for i in range(0, 100_000, 10):
        pool.allocate(f"s{i}", 10)
    for i in range(0, 100_000, 20):
        pool.release(f"s{i}")
    times = []
    for _ in range(10):
        start = time.perf_counter()
        pages = pool.allocate("big", 4096)
        times.append(time.perf_counter() - start)
        assert runs(pages) == 410
        pool.release("big")
    assert min(times) < 0.02, f"{min(times) * 1e3:.2f} ms; a few tenths of a millisecond are normal"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_counts_add_up_under_any_order(data: st.DataObject) -> None:
    pool = PagePool(24, state_slots=3, growth_reserve=2)
    names = st.sampled_from(["a", "b", "c", "d"])
    for _ in range(data.draw(st.integers(1, 40))):
        name = data.draw(names)
        action = data.draw(
            st.sampled_from(
                ["allocate", "state", "release", "quarantine", "prove", "share", "match", "rename", "fork"]
            )
        )
        held = set().union(*[set(pool.pages_of(n)) | set(pool.quarantined_of(n)) for n in "abcd"])
        if action == "allocate":
            count = data.draw(st.integers(0, 12))
            room = pool.available
            try:
                got = pool.allocate(name, count)
            except NoPages:
                assert count > room
            else:
                assert len(set(got)) == count
                assert not held & set(got)
        elif action == "state" and pool.state_slot_of(name) < 0 and pool.free_states:
            pool.allocate_state(name)
        elif action == "release":
            pool.release(name)
        elif action == "quarantine":
            try:
                pool.quarantine(name)
            except ValueError:
                pool.release_quarantined(name)
        elif action == "prove":
            pool.release_quarantined(name)
        elif action == "share" and pool.pages_of(name):
            pool.share(name, [pool.pages_of(name)[0]], [data.draw(st.sampled_from(keys(6)))])
        elif action == "fork":
            pool.fork(name, f"{name}'", pool.pages_of(name)[:2])
        elif action == "match":
            pool.match(name, keys(data.draw(st.integers(0, 6))))
        elif action == "rename":
            other = data.draw(names)
            if pool.state_slot_of(other) < 0 or pool.state_slot_of(name) < 0:
                pool.rename(name, other)
        pool.check()
        assert pool.free + pool.cached + pool.shared + pool.owned + pool.quarantined == 24
    for name in "abcd":
        pool.release(name)
        pool.release(f"{name}'")
        pool.release_quarantined(name)
    pool.flush_cache()
    assert (pool.free, pool.free_states) == (24, 3)
    pool.check()
